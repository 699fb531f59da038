"""HeadraceECConnector: the embeddings of vLLM's images in the machine's kvbm, so that an image is encoded once.

    scheduler   ensure_cache_available ─▶ has_cache_item ─▶ update_state_after_alloc ─▶ build_connector_meta ──┐ orders
    worker      start_load_caches … the vision tower … save_caches, build_connector_worker_meta ◀──────────────┘
    scheduler   update_connector_output ◀── embeddings that were encoded

vLLM makes one in its scheduler and one in each worker process. The scheduler's asks the kvbm, and has an image's
embeddings in hand before it says that they are there: a kvbm that is lost then costs no step. This module only
translates; `wanted` decides, `exchange` asks.
"""

# ruff: noqa: ARG002 - the arguments are those of vLLM's interface

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import get_encoder_output_width
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from services.worker.kv_connector.embedding_store import OWED_LIMIT, KvbmEmbeddings
from services.worker.vllm.connector.identity import (
    image_key,
    instance_of,
    model_files,
    served_name,
    weights_digest,
)
from services.worker.vllm.encoder_cache.exchange import EmbeddingExchange
from services.worker.vllm.encoder_cache.wanted import SeenImage, StepTransfers, WantedImages
from services.worker.vllm.images import ImagePrompts
from services.worker.vllm.kv_transfer import ImageCounts
from shared.errors import ConfigError
from shared.hashing import salted_image_key
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout

SLOT_TOKENS = 1280
"""Most tokens of an image whose embeddings are exchanged, if images of the model differ in them: each takes the memory
of this many, or of the model's most if these are fewer."""
MOST_IMAGES = 8
"""Most images at once that are asked for, held for a step, or encoded for others: more than a step of vLLM takes."""

_log = logging.getLogger(__name__)


@dataclass
class ImageOrders(ECConnectorMetadata):  # type: ignore[misc]
    """What travels to the workers with a step."""

    images: StepTransfers
    shape: tuple[int, int]
    """Tokens of the largest image that is exchanged, and numbers of a token's embedding."""


@dataclass
class ImageReports(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """What travels back."""

    encoded: dict[str, bytes] = field(default_factory=dict)
    """Image → its embeddings; empty if they have another shape or type than expected."""
    entries: int = 0
    """Images that vLLM keeps."""
    size_bytes: int = 0

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, ImageReports)
        most = max(self, other, key=lambda each: each.entries)
        return ImageReports(self.encoded | other.encoded, most.entries, most.size_bytes)


class ImageStats(ECConnectorStats):  # type: ignore[misc]
    """Counts since the start. A newer one replaces an older one."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        return ImageStats(data={**self.data, **other.data})

    def reduce(self) -> dict[str, int | float]:
        return {f"images {name}": self.data.get(name, 0) for name in ("hits", "fetched", "encoded")}

    def is_empty(self) -> bool:
        return not self.data


class HeadraceECConnector(ECConnectorBase):  # type: ignore[misc]
    """One role of the connector. Raise ConfigError if vLLM's configuration does not fit."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        given = vllm_config.ec_transfer_config
        if given.ec_role != "ec_both":
            raise ConfigError(f"HeadraceECConnector: ec_role is {given.ec_role}; it must be ec_both")
        self._config = vllm_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._half = _SchedulerHalf(vllm_config) if role is ECConnectorRole.SCHEDULER else None
        self._cache: dict[str, torch.Tensor] = {}
        """vLLM's own embeddings, by image."""
        self._encoded: dict[str, bytes] = {}
        self._reported: ImageReports | None = None

    # --- in the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._scheduler.want(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.wanted.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler.wanted.place(request.request_id, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.ec_connector_worker_meta
        if isinstance(reports, ImageReports):
            self._scheduler.take_reports(reports)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> ImageStats | None:
        return None if self._half is None else self._half.new_stats()

    @property
    def _scheduler(self) -> _SchedulerHalf:
        assert self._half is not None, "called in a worker"
        return self._half

    # --- in a worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, ImageOrders)
        self._cache = encoder_cache
        for name, embeddings in orders.images.loads:
            loaded = torch.frombuffer(bytearray(embeddings), dtype=self._dtype).reshape(-1, orders.shape[1])
            encoder_cache[name] = loaded.to(current_platform.device_type)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if isinstance(orders, ImageOrders) and mm_hash in orders.images.saves and get_tp_group().rank_in_group == 0:
            made = encoder_cache[mm_hash]
            fits = (tuple(made.shape[1:]), made.dtype) == (orders.shape[1:], self._dtype)
            fits = fits and len(made) <= orders.shape[0]
            flat = made.detach().contiguous().cpu().view(torch.uint8) if fits else None
            self._encoded[mm_hash] = b"" if flat is None else flat.numpy().tobytes()

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        encoded, self._encoded = self._encoded, {}
        report = ImageReports(encoded, len(self._cache), sum(each.nbytes for each in self._cache.values()))
        if report == self._reported and not encoded:
            return None
        self._reported = ImageReports({}, report.entries, report.size_bytes)
        return report

    # --- in both

    def shutdown(self) -> None:
        if self._half is not None:
            self._half.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ImageStats:
        return ImageStats(data=data or {})


class _SchedulerHalf:
    """The connector's half in vLLM's scheduler."""

    def __init__(self, config: VllmConfig) -> None:
        self.wanted = WantedImages(time.monotonic, MOST_IMAGES)
        self._config = config
        self._weights = _weights(config)
        self._exchange: EmbeddingExchange | None = None
        """None until the first image has come."""
        self._shape = (0, get_encoder_output_width(config, "image"))
        self._slot_tokens = _slot_tokens(config)
        self._requests: dict[str, tuple[Any, list[SeenImage]]] = {}
        """Name → vLLM's request with images, and these."""
        self._kept = (0, 0)
        """Images that vLLM keeps, and their bytes."""
        self._shown = ImageCounts()

    def want(self, request: Any, computed: int) -> bool:
        """Return whether a request may go on."""
        name, wanted = request.request_id, self.wanted
        exchange = self._exchange = self._exchange or self._begin(request.mm_features[0].mm_position.length)
        if name not in self._requests:
            self._requests[name] = request, list(self._images(request))
        for number, embeddings in exchange.answers():
            wanted.answer(number, embeddings)
        may = wanted.want(name, self._requests[name][1], computed)
        for asked in wanted.take_asked():
            exchange.ask(asked)
        self._give_up()
        return may

    def orders(self, step: Any) -> ImageOrders:
        """Return what the workers do in a step, for which vLLM has made room."""
        computed = [
            (name, seen[0].num_computed_tokens, seen[0].num_computed_tokens + tokens)
            for name, tokens in step.num_scheduled_tokens.items()
            if (seen := self._requests.get(name)) is not None
        ]
        images = self.wanted.take_step(computed, step.free_encoder_mm_hashes)
        self._give_up()
        if images.loads:  # without what fills their slots
            known = {each.name: each.end - each.start for _, shown in self._requests.values() for each in shown}
            cut = [(name, made[: known[name] * self._token_bytes]) for name, made in images.loads]
            images = replace(images, loads=cut)
        return ImageOrders(images, self._shape)

    def take_reports(self, reports: ImageReports) -> None:
        """A step has ended."""
        self._kept = reports.entries, reports.size_bytes
        for name, embeddings in reports.encoded.items():
            if self._exchange is not None and (number := self.wanted.deliver(name)):
                self._exchange.deliver(
                    number, embeddings and embeddings.ljust(self._shape[0] * self._token_bytes, b"\0")
                )

    def forget(self, name: str) -> None:
        """A request has ended."""
        if self._requests.pop(name, None) is not None:
            self.wanted.forget(name)
            self._give_up()

    def new_stats(self) -> ImageStats | None:
        """Return the counts, if they have changed."""
        entries, size_bytes = self._kept
        counts = replace(self.wanted.counts, entries=entries, size_bytes=size_bytes)
        if counts == self._shown:
            return None
        self._shown = counts
        return ImageStats(data={name: getattr(counts, name) for name in counts.__struct_fields__})

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _images(self, request: Any) -> Iterator[SeenImage]:
        for feature in request.mm_features:
            place, key = feature.mm_position, image_key(feature.identifier)
            if place.length > self._shape[0] or (not self._slot_tokens and place.length != self._shape[0]):
                key = b""  # embeddings of another size
            salted = salted_image_key(key, request.cache_salt or "") if key else b""
            yield SeenImage(feature.identifier, salted, place.offset, place.offset + place.length)

    def _begin(self, tokens: int) -> EmbeddingExchange:
        """The first image has come: from now on, those with as many tokens are exchanged, unless a slot has room for
        any number of them."""
        config, model = self._config, self._config.model_config
        given = config.ec_transfer_config.ec_connector_extra_config
        self._shape = shape = (self._slot_tokens or tokens, self._shape[1])
        dtype = str(model.dtype).removeprefix("torch.")
        layout = StoreLayout(
            model=given["model_name"] or served_name(model),
            weights=self._weights,
            kv=KvLayout(
                *(dtype, 1, 1, 1, 1),
                form=f"embeddings of images, {shape[0]} x {shape[1]}, vLLM {vllm.__version__}",
                form_bytes=shape[0] * self._token_bytes,
            ),
        )
        directory, instance = Path(given["pool"]), instance_of(config.parallel_config)
        wait_s = float(given["timeout_s"])
        owed = OWED_LIMIT // MOST_IMAGES  # of each store
        return EmbeddingExchange(
            lambda: KvbmEmbeddings(directory, instance, layout, wait_s, owed_limit=owed), dtype, MOST_IMAGES
        )

    @property
    def _token_bytes(self) -> int:
        size_bytes: int = self._shape[1] * self._config.model_config.dtype.itemsize
        return size_bytes

    def _give_up(self) -> None:
        for number in self.wanted.take_given_up():
            if self._exchange is not None:
                self._exchange.deliver(number, b"")


def _slot_tokens(config: VllmConfig) -> int:
    """Return for how many tokens an image's slot has room. 0 means as many as the first image has."""
    takes = ImagePrompts.read(config.model_config, 1)
    if takes is None or not takes.input.unit:
        return 0
    return min(SLOT_TOKENS, takes.input.most_pixels // takes.input.unit**2)


def _weights(config: VllmConfig) -> str:
    """Return a digest of the model's files, and of what else changes embeddings. Raise ConfigError."""
    model = config.model_config
    said = {"quantization": str(model.quantization), "load_format": str(config.load_config.load_format)}
    return weights_digest(model_files(model.model, model.revision), model.hf_config.to_dict(), said)
