"""HeadraceConnector: vLLM's blocks in the machine's kvbm, next to those of other engines.

    vllm serve … --kv-transfer-config '{"kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "services.worker.vllm.connector.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": "DIRECTORY"}}'

vLLM makes one in its scheduler and one in each worker process, and calls both around each step:

    scheduler   get_num_new_matched_tokens ─▶ update_state_after_alloc ─▶ build_connector_meta ──┐ orders
    workers     start_load_kv … the forward pass … get_finished, build_connector_worker_meta ◀──┘
    scheduler   update_connector_output ◀── reports

This module only translates; `scheduler_half` and `worker_half` do the work. Loads are asynchronous: a request waits for
its blocks while others compute.

docs/decisions/0067 gives the reasons.
"""

# ruff: noqa: ARG002 - the arguments are those of vLLM's interface

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.identity import (
    identify,
    idle_steps,
    keeps_blocks_whole,
    lora_name,
    placed_images,
    refusal,
    renamed,
)
from services.worker.vllm.connector.interface import check_interface
from services.worker.vllm.connector.own_log import log_with
from services.worker.vllm.connector.pool import PoolBlock
from services.worker.vllm.connector.rank import worker_half
from services.worker.vllm.connector.scheduler_half import Identity, SchedulerHalf
from services.worker.vllm.connector.settings import read_settings
from services.worker.vllm.connector.stats import ConnectorMetrics, ConnectorStats, stats_of
from services.worker.vllm.connector.worker_half import WorkerHalf
from services.worker.vllm.kv_transfer import hand_over_name, is_expected
from shared.errors import ConfigError

check_interface(vllm.__version__, KVConnectorBase_V1)
# In a chain vLLM finds the class of statistics by this name.
if "HeadraceConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("HeadraceConnector", __name__, "HeadraceConnector")
log_with("vllm")


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """What travels to the workers with a step."""

    packed: bytes = b""


@dataclass
class StepReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What travels back: one report of each rank that has something to say."""

    packed: list[bytes] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReports)
        return StepReports([*self.packed, *other.packed])


class HeadraceConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One role of the connector. Raise ConfigError if settings or vLLM's configuration do not fit."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for config in (vllm_config, get_current_vllm_config_or_none()):  # in a chain, the child's and the engine's
            if config is not None and (fault := refusal(config, kv_cache_config)):
                raise ConfigError(f"HeadraceConnector: {fault}")
        self._config = vllm_config
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._manager: Any = None
        self._requests: dict[str, Any] = {}
        """vLLM's requests whose blocks are exchanged."""
        self._due: dict[str, int] = {}
        """Request → computed tokens from which on its blocks must be looked at."""
        self._identity: Identity
        self._resets = 0

    @property
    def requires_kv_delivery(self) -> bool:
        """If false, blocks that are not stored are computed again."""
        return False

    # --- in the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        self._identity = identify(self._config, self._kv_cache_config, self._settings)
        self._scheduler = SchedulerHalf(
            *(self._settings, self._identity, kv_cache_manager.block_pool, time.monotonic),
            idle_steps=idle_steps(self._config),
        )
        self._scheduler.keep_link()

    def on_new_request(self, request: Any) -> None:
        lora = lora_name(request.lora_request, self._settings)
        images = placed_images(request.mm_features, self._settings)
        if lora is None or images is None or request.prompt_embeds is not None or request.resumable:
            return  # its blocks are not named by tokens, images, LoRA and salt alone
        identity = self._half.identity
        salt = request.cache_salt or ""
        chain = TokenChain(request.all_token_ids, identity.block_size, identity.model, lora, salt, images)
        if self._settings.prefetches and is_expected(request.kv_transfer_params):
            self._half.expect(request.request_id, chain)
            return
        self._requests[request.request_id] = request
        self._half.track(request.request_id, chain)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        if self._half.find_expected(request, request.num_tokens, num_computed_tokens):
            return None, False
        tokens = self._half.find(request.request_id, request.num_tokens, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._due.pop(request.request_id, None)
        ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._half.place(request.request_id, ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        host = min(num_external_tokens, self._half.placed_in_memory(request.request_id))
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        requests, due = self._requests, self._due
        for name in scheduler_output.num_scheduled_tokens:
            request = requests.get(name)
            if request is not None and request.num_computed_tokens - request.num_in_flight_tokens >= due.get(name, 0):
                self._offer(request)
        return StepOrders(self._half.orders(computes=bool(scheduler_output.num_scheduled_tokens)))

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        self._half.take_reports(reports.packed if isinstance(reports, StepReports) else ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._requests.pop(request.request_id, None) is not None:
            more = self._offer(request)
            if name := hand_over_name(request.kv_transfer_params):
                while more:
                    more = self._offer(request)
                self._half.hand_over(request.request_id, name, request.num_tokens - 1)
        self._due.pop(request.request_id, None)
        self._half.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.unsettled

    def reset_cache(self) -> bool:
        """Stop using what was stored so far: the weights may be others from now on. Other engines keep it."""
        if not self._settings.keep_on_reset:
            self._resets += 1
            self._half.rename(renamed(self._identity, self._resets))
        return True

    def _offer(self, request: Any) -> bool:
        """Offer a bounded number of the blocks that processed steps have filled. Return whether there are more."""
        name = request.request_id

        def blocks() -> Sequence[PoolBlock]:
            return cast(Sequence[PoolBlock], self._manager.get_blocks(name).blocks[0])

        # Drafts that were accepted after the last token count as computed, but are no tokens of the request.
        computed = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        self._due[name] = due = self._half.offer_computed(name, computed, blocks)
        return bool(due <= computed)

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called before bind_kv_cache_manager, or in a worker"
        return self._scheduler

    # --- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker = worker_half(self._config, self._kv_cache_config, self._settings, kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        if self._worker is not None:
            assert isinstance(orders, StepOrders)
            self._worker.take_orders(orders.packed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no step uses blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: blocks are saved once their step is processed."""

    def wait_for_save(self) -> None:
        """Nothing to wait for, as above."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = self._worker.finished_loads() if self._worker is not None else set()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.take_report() if self._worker is not None else b""
        return StepReports([report]) if report else None

    # --- in both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._scheduler is None or (new := self._scheduler.new_stats()) is None:
            return None
        blocks = self._scheduler.blocks
        return stats_of(*new, dropped=blocks.dropped, late=blocks.late, prefetched=blocks.expected.loaded)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the order of the KV in memory that vLLM takes if its attention backends can. None leaves it to
        vLLM."""
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        whole = keeps_blocks_whole(vllm_config, settings, on_cpu=current_platform.is_cpu())
        return KVCacheLayout.BLNHC.name if whole else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorMetrics | None:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
