"""What the engine says of itself, at /metrics and /health.

Stepped of each rank ─▶ gauges of each rank
MemoryUse            ─▶ gauges of the GPU's memory
Probed               ─▶ a counter, a gauge, and the last probe of each rank at /health
OwnMetrics           ─▶ vLLM's own series, as vLLM last sent them, with our labels
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.worker.contracts.messages import EngineLoad, MemoryUse, OwnMetrics, Probed
from shared.metrics import counter, gauge, register_metrics

_log = logging.getLogger(__name__)


class EngineObservations:
    """The observations of the engine that lives. Labels are bounded by its ranks."""

    # fmt: off
    _probes = counter("headrace_engine_probes", "outcome",
        "Probes of an engine that was idle, by outcome: ok, failed",
        "`failed`: the engine is killed and started again.")
    _probe_s = gauge("headrace_engine_probe_seconds", "rank",
        "Seconds of the last probe", "The device is shared, or slow.")
    _blocks = gauge("headrace_rank_blocks", "rank state", "Device blocks of a rank by state", "As `headrace_blocks`.")
    _running = gauge("headrace_rank_inflight_requests", "rank", "Attempts running at a rank")
    _waiting = gauge("headrace_rank_queued_requests", "rank",
        "Attempts waiting at a rank", "As `headrace_queued_requests`.")
    _step_s = gauge("headrace_rank_step_seconds", "rank",
        "Seconds of a step of a rank that only decodes, lately. 0 if not measured yet",
        "One rank far above the others: its GPU is slow.")
    _hit_rate = gauge("headrace_rank_hit_rate", "rank",
        "Share of prompt tokens that a rank of vLLM found in its prefix cache, since the engine started",
        "The higher the better.")
    _memory = gauge("headrace_gpu_memory_bytes", "state",
        "Memory of the native engine's GPU: used (weights, KV, steps), kept (free, for the next allocations), others "
        "(other processes, CUDA itself), free",
        "`others`: another process takes memory of the GPU.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        register_metrics(self, registry)
        self._of_engine = (
            self._memory,
            self._probe_s,
            self._blocks,
            self._running,
            self._waiting,
            self._step_s,
            self._hit_rate,
        )
        self._own = OwnSeries(registry)
        self._last_probes: dict[int, tuple[float, Probed]] = {}
        """Rank → when its last probe ended, and what came of it."""

    def record(self, report: Probed | MemoryUse | OwnMetrics) -> None:
        """Take up a report of the engine."""
        if isinstance(report, MemoryUse):
            for state in ("used", "kept", "others", "free"):
                self._memory.labels(state).set(getattr(report, state))
            return
        if isinstance(report, OwnMetrics):
            self._own.text = report.text
            return
        self._probes.labels("failed" if report.failed else "ok").inc()
        self._probe_s.labels(str(report.rank)).set(report.took_s)
        self._last_probes[report.rank] = self._clock(), report

    def show_ranks(self, loads: Mapping[int, EngineLoad], capacity_blocks: int) -> None:
        """Show the load of each rank, which has `capacity_blocks` blocks."""
        for number, load in loads.items():
            rank = str(number)
            free = max(0, capacity_blocks - load.held_blocks - load.cached_blocks)
            for state, blocks in (("held", load.held_blocks), ("cached", load.cached_blocks), ("free", free)):
                self._blocks.labels(rank, state).set(blocks)
            self._running.labels(rank).set(load.running)
            self._waiting.labels(rank).set(load.waiting)
            self._step_s.labels(rank).set(load.step_s)
            if load.queried_tokens:
                self._hit_rate.labels(rank).set(load.found_tokens / load.queried_tokens)

    def engine_lost(self) -> None:
        """Forget the engine: its series end."""
        self._own.text = ""
        self._last_probes.clear()
        for each in self._of_engine:
            each.clear()

    @property
    def last_probes(self) -> list[str]:
        """The last probe of each rank, for /health."""
        now_s = self._clock()
        return [
            f"rank {rank}: {probed.failed or 'ok'}, {now_s - ended_s:.0f} s ago, took {probed.took_s:.3f} s"
            for rank, (ended_s, probed) in sorted(self._last_probes.items())
        ]


class OwnSeries(Collector):
    """The series of a text that the engine has sent. Our registry adds its labels. The text is read when Prometheus
    asks; a torn one costs the engine's series, never ours."""

    # fmt: off
    _torn = counter("headrace_engine_metrics_torn", "",
        "Texts of the engine's own metrics that could not be read", "vLLM's metrics cannot be read: please report it.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        self.text = ""
        """Prometheus's text. Empty if there are none."""
        register_metrics(self, registry)
        self._logged = False
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the names, which begin with `vllm:`, are known only when the engine has sent them."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            families = list(text_string_to_metric_families(self.text))
        except ValueError as wrong:
            self._torn.inc()
            self.text = ""
            if not self._logged:
                _log.error("the engine's own metrics are left out, since they cannot be read: %s", wrong)
            self._logged = True
            return
        yield from families
