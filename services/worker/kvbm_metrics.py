"""What a worker counts of its exchange with kvbm."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.engine import Exchanged
from shared.metrics import ROUND_TRIP_SECONDS, counter, gauge, histogram


class KvbmMetrics:
    """One worker's; labels are few and bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.attached = gauge(registry, "headrace_kvbm_attached", "1 while blocks are exchanged with a kvbm, else 0")
        self._asks = counter(
            registry,
            "headrace_kvbm_asks",
            "Questions to kvbm by outcome: answered, away (no kvbm, no NATS), late, too_many, failed",
            ["operation", "outcome"],
        )
        self._ask_s = histogram(
            registry,
            "headrace_kvbm_ask_seconds",
            "Until kvbm's answer, of a fetch its last one",
            ROUND_TRIP_SECONDS,
            ["operation"],
        )
        self._blocks = counter(
            registry,
            "headrace_kvbm_copied_blocks",
            "Blocks copied to kvbm's pool and committed (saved), copied from it (loaded), and copies that came to "
            "nothing (bad)",
            ["outcome"],
        )
        self._bytes = counter(registry, "headrace_kvbm_copied_bytes", "Copied to and from kvbm's pool", ["direction"])
        self._copy_s = counter(registry, "headrace_kvbm_copy_seconds", "Spent copying", ["direction"])
        self._before = Exchanged()
        """As the engine that runs told it last."""

    def answered(self, operation: str, took_s: float) -> None:
        self._asks.labels(operation, "answered").inc()
        self._ask_s.labels(operation).observe(took_s)

    def failed(self, operation: str, outcome: str) -> None:
        """A question got no answer, or not its last one."""
        self._asks.labels(operation, outcome).inc()

    def exchanged(self, now: Exchanged) -> None:
        """What the engine has copied so far."""
        before, self._before = self._before, now
        self._blocks.labels("saved").inc(now.saved_blocks - before.saved_blocks)
        self._blocks.labels("loaded").inc(now.loaded_blocks - before.loaded_blocks)
        self._blocks.labels("bad").inc(now.bad_blocks - before.bad_blocks)
        self._bytes.labels("save").inc(now.saved_bytes - before.saved_bytes)
        self._bytes.labels("load").inc(now.loaded_bytes - before.loaded_bytes)
        self._copy_s.labels("save").inc(now.save_s - before.save_s)
        self._copy_s.labels("load").inc(now.load_s - before.load_s)

    def engine_started(self) -> None:
        self._before = Exchanged()
