"""HeadraceECConnector: the embeddings of vLLM's images in the machine's kvbm, so that an image is encoded once.

    scheduler   ensure_cache_available ─▶ has_cache_item ─▶ update_state_after_alloc ─▶ build_connector_meta ──┐ orders
    worker      start_load_caches … the vision tower … save_caches, build_connector_worker_meta ◀──────────────┘
    scheduler   update_connector_output ◀── embeddings that were encoded

A vLLM with the role ec_producer only encodes: it loads nothing, and what it has encoded goes through `report_files`.

vLLM makes one in its scheduler and one in each worker process. The scheduler's asks the kvbm, and has an image's
embeddings in hand before it says that they are there: a kvbm that is lost then costs no step. This module only
translates; `wanted` decides, ThreadedLookups ask.
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

from services.worker.kv_connector.embedding_lookups import THREADS, ThreadedLookups, is_finite
from services.worker.kv_connector.embedding_store import OWED_LIMIT, KvbmEmbeddings
from services.worker.vllm.connector.identity import (
    image_key,
    instance_of,
    model_files,
    served_name,
    weights_digest,
)
from services.worker.vllm.encoder_cache.report_files import ReportFiles
from services.worker.vllm.encoder_cache.wanted import MOST_IMAGES, SeenImage, StepTransfers, WantedImages
from services.worker.vllm.images import ImagePrompts
from services.worker.vllm.kv_transfer import ImageCounts
from services.worker.vllm.qwen_images import DEFAULT_TOKENS
from shared.errors import ConfigError
from shared.hashing import salted_image_key
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout

SLOT_TOKENS = DEFAULT_TOKENS
"""Most tokens of an image whose embeddings are exchanged, if images of the model differ in them: each takes the memory
of this many, or of the model's most if these are fewer."""

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
    image_s: float = 0.0
    """Seconds that each of `encoded` took. 0 if there is none."""

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, ImageReports)
        most = max(self, other, key=lambda each: each.entries)
        image_s = max(self.image_s, other.image_s)
        return ImageReports(self.encoded | other.encoded, most.entries, most.size_bytes, image_s)


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
        if given.ec_role not in ("ec_both", "ec_producer"):
            raise ConfigError(f"HeadraceECConnector: ec_role is {given.ec_role}; it must be ec_both or ec_producer")
        files = given.ec_connector_extra_config["reports"] if given.is_encode_only else ""
        self._files = ReportFiles(Path(files)) if files else None
        """Where reports go. None if they go with vLLM's own messages."""
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._half = _SchedulerHalf(vllm_config) if role is ECConnectorRole.SCHEDULER else None
        self._cache: dict[str, torch.Tensor] = {}
        """vLLM's own embeddings, by image."""
        self._began_s = 0.0
        """When the step under way began."""
        self._saved = 0
        """Images that it has encoded so far."""
        self._image_s = 0.0
        self._encoded: dict[str, bytes] = {}
        self._reported: ImageReports | None = None

    # --- in the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._is_probe(request) or self._scheduler.want(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.wanted.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if not self._is_probe(request):
            self._scheduler.wanted.place(request.request_id, request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.ec_connector_worker_meta
        if isinstance(reports, ImageReports):
            self._scheduler.take_reports(reports)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        for encoded, image_s in self._files.take() if self._files is not None else ():
            self._scheduler.take_reports(ImageReports(encoded, image_s=image_s))
        self._scheduler.forget(request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> ImageStats | None:
        return None if self._half is None else self._half.new_stats()

    def _is_probe(self, request: Any) -> bool:
        """Whether a request of a vLLM that only encodes is no order: its image has no key, and is not counted."""
        return self._files is not None and not _key(request.mm_features[0].identifier)

    @property
    def _scheduler(self) -> _SchedulerHalf:
        assert self._half is not None, "called in a worker"
        return self._half

    # --- in a worker

    def start_save_caches(self, **kwargs: Any) -> None:
        self._began_s, self._saved = time.monotonic(), 0

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, ImageOrders)
        self._cache = encoder_cache
        for name, embeddings in orders.images.loads:
            loaded = torch.frombuffer(bytearray(embeddings), dtype=self._dtype).reshape(-1, orders.shape[1])
            encoder_cache[name] = loaded.to(current_platform.device_type)
        self._began_s = time.monotonic()

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        orders = self._connector_metadata
        self._saved += 1
        if isinstance(orders, ImageOrders) and mm_hash in orders.images.saves and get_tp_group().rank_in_group == 0:
            made = encoder_cache[mm_hash]
            fits = (tuple(made.shape[1:]), made.dtype) == (orders.shape[1:], self._dtype)
            fits = fits and len(made) <= orders.shape[0]
            flat = made.detach().contiguous().cpu().view(torch.uint8) if fits else None
            self._encoded[mm_hash] = b"" if flat is None else flat.numpy().tobytes()
            self._image_s = (time.monotonic() - self._began_s) / self._saved  # the copy has waited for all of them

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        encoded, self._encoded = self._encoded, {}
        image_s = self._image_s if encoded else 0.0
        if self._files is not None:
            if encoded:
                self._files.put(encoded, image_s)
            return None
        report = ImageReports(encoded, len(self._cache), sum(each.nbytes for each in self._cache.values()), image_s)
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
        self._layout = store_layout(config)
        self._lookups: ThreadedLookups | None = None
        """None until the first image has come."""
        self._asked: dict[int, bytes] = {}
        """Question → the key of its image, until the image was found, encoded or given up."""
        self._shape = (0, get_encoder_output_width(config, "image"))
        self._slot_tokens = _slot_tokens(config)
        self._requests: dict[str, tuple[Any, list[SeenImage]]] = {}
        """Name → vLLM's request with images, and these."""
        self._kept = (0, 0)
        """Images that vLLM keeps, and their bytes."""
        self._image_s = 0.0
        """Seconds that it takes to encode an image, as measured lately."""
        self._shown = ImageCounts()

    def want(self, request: Any, computed: int) -> bool:
        """Return whether a request may go on."""
        name, wanted = request.request_id, self.wanted
        lookups = self._lookups = self._lookups or self._begin(request.mm_features[0].mm_position.length)
        if name not in self._requests:
            self._requests[name] = request, list(self._images(request))
        for key, found in lookups.take_found():
            good = found if found is not None and is_finite(found, self._layout.kv.dtype) else b""
            for number in [number for number, each in self._asked.items() if each == key]:
                wanted.answer(number, good)
                if good:
                    del self._asked[number]
        may = wanted.want(name, self._requests[name][1], computed)
        for asked in wanted.take_asked():
            self._asked[asked.number] = asked.key
            lookups.look_up(asked.key)
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
        if self._config.ec_transfer_config.is_encode_only:
            images = replace(images, loads=[])
        if images.loads:  # without what fills their slots
            known = {each.name: each.end - each.start for _, shown in self._requests.values() for each in shown}
            cut = [(name, made[: known[name] * self._token_bytes]) for name, made in images.loads]
            images = replace(images, loads=cut)
        return ImageOrders(images, self._shape)

    def take_reports(self, reports: ImageReports) -> None:
        """A step has ended."""
        self._kept = reports.entries, reports.size_bytes
        if reports.image_s:
            self._image_s = (self._image_s + reports.image_s) / 2 if self._image_s else reports.image_s
        for name, embeddings in reports.encoded.items():
            key = self._asked.pop(self.wanted.deliver(name), b"")
            if self._lookups is not None and key and embeddings:
                self._lookups.keep(key, embeddings.ljust(self._shape[0] * self._token_bytes, b"\0"))
            elif self._lookups is not None and key:
                self._lookups.give_up(key)

    def forget(self, name: str) -> None:
        """A request has ended."""
        if self._requests.pop(name, None) is not None:
            self.wanted.forget(name)
            self._give_up()

    def new_stats(self) -> ImageStats | None:
        """Return the counts, if they have changed."""
        entries, size_bytes = self._kept
        counts = replace(self.wanted.counts, entries=entries, size_bytes=size_bytes, image_s=self._image_s)
        if counts == self._shown:
            return None
        self._shown = counts
        return ImageStats(data={name: getattr(counts, name) for name in counts.__struct_fields__})

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()

    def _images(self, request: Any) -> Iterator[SeenImage]:
        for feature in request.mm_features:
            place, key = feature.mm_position, _key(feature.identifier)
            if place.length > self._shape[0] or (not self._slot_tokens and place.length != self._shape[0]):
                key = b""  # embeddings of another size
            salted = salted_image_key(key, request.cache_salt or "") if key else b""
            yield SeenImage(feature.identifier, salted, place.offset, place.offset + place.length)

    def _begin(self, tokens: int) -> ThreadedLookups:
        """The first image has come: from now on, those with as many tokens are exchanged, unless a slot has room for
        any number of them."""
        given = self._config.ec_transfer_config.ec_connector_extra_config
        self._shape = shape = (self._slot_tokens or tokens, self._shape[1])
        layout = replace(self._layout, kv=_kv_layout(self._config, *shape))
        directory, instance = Path(given["pool"]), instance_of(self._config.parallel_config)
        wait_s = float(given["timeout_s"])
        owed = max(1, OWED_LIMIT // THREADS)  # of each store
        return ThreadedLookups(lambda: KvbmEmbeddings(directory, instance, layout, wait_s, owed_limit=owed))

    @property
    def _token_bytes(self) -> int:
        size_bytes: int = self._shape[1] * self._config.model_config.dtype.itemsize
        return size_bytes

    def _give_up(self) -> None:
        for number in self.wanted.take_given_up():
            key = self._asked.pop(number, b"")
            if self._lookups is not None and key not in self._asked.values():
                self._lookups.give_up(key)


def _slot_tokens(config: VllmConfig) -> int:
    """Return for how many tokens an image's slot has room. 0 means as many as the first image has."""
    takes = ImagePrompts.read(config.model_config, 1)
    if takes is None or not takes.input.unit:
        return 0
    return min(SLOT_TOKENS, takes.input.most_pixels // takes.input.unit**2)


def _key(name: str) -> bytes:
    """Return the key that vLLM's name of an image stands for. Empty if it is none. A name may have an ending of its
    own, by which vLLM's caches tell it from others with the same key."""
    return image_key(name.partition(".")[0])


def store_layout(config: VllmConfig) -> StoreLayout:
    """Return what must be the same in two engines that exchange embeddings of images, but for the sizes of images.
    Raise ConfigError."""
    model, given = config.model_config, config.ec_transfer_config.ec_connector_extra_config
    said = {"quantization": str(model.quantization), "load_format": str(config.load_config.load_format)}
    return StoreLayout(
        model=given["model_name"] or served_name(model),
        weights=weights_digest(model_files(model.model, model.revision), model.hf_config.to_dict(), said),
        kv=_kv_layout(config),
    )


def _kv_layout(config: VllmConfig, tokens: int = 0, width: int = 0) -> KvLayout:
    dtype = config.model_config.dtype
    form = f"embeddings of images, {tokens} x {width}, vLLM {vllm.__version__}"
    name = str(dtype).removeprefix("torch.")
    return KvLayout(name, 1, 1, 1, 1, form=form, form_bytes=tokens * width * dtype.itemsize)
