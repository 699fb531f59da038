"""KvbmMetrics: what a worker counts of its exchange with kvbm."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import EngineLoad, Exchanged, KvbmAsked, Stepped
from services.worker.kv_connector.stats import bounded_name
from shared.metrics import ROUND_TRIP_SECONDS, counter, gauge, histogram, register_metrics


class KvbmMetrics:
    """One worker's metrics of its kvbm; labels are few and bounded. The engine's counts are published with each load
    report."""

    # fmt: off
    attached = gauge("headrace_kvbm_attached", "",
        "1 while blocks are exchanged with a kvbm, else 0; only where kvbm.pool is set",
        "0: kvbm is gone, or has another layout. See the worker's log.")
    _asks = counter("headrace_kvbm_asks", "operation outcome",
        "Requests to kvbm by outcome: answered, away (no kvbm), late",
        "`late`: kvbm is too slow. `away`: it is gone.")
    _ask_s = histogram("headrace_kvbm_ask_seconds", "operation", ROUND_TRIP_SECONDS,
        "Seconds until the engine has kvbm's answer, or its last answer to a fetch; a CPU engine looks between steps",
        "kvbm's core or disk is full, or steps are long.")
    _onboarding = gauge("headrace_onboarding_requests", "",
        "Attempts that wait for blocks from kvbm", "kvbm's disk is slow.")
    _late = counter("headrace_late_onboardings", "",
        "Attempts that stopped waiting for blocks from kvbm, because they came too late",
        "Loading takes longer than computing: see [kvbm.md](kvbm.md).")
    _shared = gauge("headrace_lent_blocks", "",
        "Device blocks that decode workers of the machine copy, or may copy",
        "At prefill workers: a number that stays means that a decode worker is frozen.")
    _sharing_failures = counter("headrace_lending_failures", "",
        "Tries to begin to share blocks with decode workers of the machine that failed",
        "At prefill workers: too few file descriptors, or the pool's directory is not theirs. See the worker's log.")
    _prefetched = counter("headrace_prefetched_blocks", "",
        "Blocks of expected prompts that were loaded before their attempts came",
        "At decode workers: 0 while prompts are handed over means that blocks come late.")
    _offers = counter("headrace_kvbm_offered_blocks", "outcome",
        "Blocks offered to kvbm, and blocks not offered because too many waited (dropped)",
        "`dropped`: more is computed than can be copied.")
    _blocks = counter("headrace_kvbm_copied_blocks", "outcome",
        "Blocks copied to kvbm's pool and committed (saved), copied to the device (loaded), and copies that were of "
        "no use (bad)",
        "`bad`: copies that came too late, or were cancelled.")
    _bytes = counter("headrace_kvbm_copied_bytes", "direction", "Bytes copied from the device (save) and to it (load)")
    _copy_s = counter("headrace_kvbm_copy_seconds", "direction", "Seconds spent copying")
    _by_path = counter("headrace_kvbm_path_blocks", "direction path", "Blocks copied, by the path that the copies took")
    _fallbacks = counter("headrace_kvbm_copy_fallbacks", "reason",
        "Blocks copied after a better path had failed, by its name and the reason",
        "[gpu.md](gpu.md) says what each path needs.")
    _differing = counter("headrace_kvbm_differing_blocks", "",
        "Blocks that were loaded and differ from the pool's: a fault, looked for if kvbm.verify is set",
        "A fault: please report it.")
    _discarded = counter("headrace_kvbm_discarded_blocks", "",
        "Blocks that kvbm was asked to discard: damaged, or numbers computed with them were not finite",
        "Suspect memory or GPU.")
    _damaged = counter("headrace_kvbm_damaged_blocks", "",
        "Blocks in kvbm's memory that did not match their checksum when loaded, where kvbm.checksums is set",
        "Suspect the machine's memory.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry, *, configured: bool = True) -> None:
        """Register them. Without a kvbm in the settings there is no `headrace_kvbm_attached`, since a 0 is a fault."""
        register_metrics(self, registry)
        self.configured = configured
        """Whether blocks are to be exchanged."""
        if not configured:
            registry.unregister(self.attached)
        self._reasons: set[str] = set()
        """Labels so far, of all engines one after the other; each engine bounds only its own."""
        self._load = self._shown_load = EngineLoad()
        """The engine's counts since it started, as they are and as they were published last."""
        self._exchanged = self._shown_exchanged = Exchanged()

    def count_asked(self, asked: KvbmAsked) -> None:
        """Count a request that has ended."""
        self._asks.labels(asked.operation, asked.outcome).inc()
        if asked.outcome == "answered":
            self._ask_s.labels(asked.operation).observe(asked.took_s)

    def count_step(self, step: Stepped) -> None:
        """Take up the counts of a step."""
        self._load = step.load
        if step.exchanged is not None:
            self._exchanged = step.exchanged

    @property
    def sharing_fails(self) -> bool:
        """Whether the engine shares nothing now, because it could not begin to the last time."""
        return self._exchanged.sharing_fails

    def engine_lost(self) -> None:
        """The engine was lost: the next one counts from 0."""
        self.publish()
        self._load = self._shown_load = EngineLoad()
        self._exchanged = self._shown_exchanged = Exchanged()
        self._onboarding.set(0)
        self._shared.set(0)

    def publish(self) -> None:
        """Add what was counted since the last call to the metrics."""
        load, before = self._load, self._shown_load
        if load is not before:
            self._onboarding.set(load.onboarding)
            self._shared.set(load.shared_blocks)
            self._late.inc(load.late_onboardings - before.late_onboardings)
            self._prefetched.inc(load.prefetched_blocks - before.prefetched_blocks)
            self._offers.labels("offered").inc(load.offered_blocks - before.offered_blocks)
            self._offers.labels("dropped").inc(load.dropped_offers - before.dropped_offers)
            self._shown_load = load
        if self._exchanged is not self._shown_exchanged:
            self._show_exchanged(self._exchanged, self._shown_exchanged)
            self._shown_exchanged = self._exchanged

    def _show_exchanged(self, now: Exchanged, before: Exchanged) -> None:
        self._blocks.labels("saved").inc(now.saved_blocks - before.saved_blocks)
        self._blocks.labels("loaded").inc(now.loaded_blocks - before.loaded_blocks)
        self._blocks.labels("bad").inc(now.bad_blocks - before.bad_blocks)
        self._bytes.labels("save").inc(now.saved_bytes - before.saved_bytes)
        self._bytes.labels("load").inc(now.loaded_bytes - before.loaded_bytes)
        self._copy_s.labels("save").inc(now.save_s - before.save_s)
        self._copy_s.labels("load").inc(now.load_s - before.load_s)
        for path, blocks in now.saved_by.items():
            self._by_path.labels("save", path).inc(blocks - before.saved_by.get(path, 0))
        for path, blocks in now.loaded_by.items():
            self._by_path.labels("load", path).inc(blocks - before.loaded_by.get(path, 0))
        for reason, blocks in now.fallbacks.items():
            shown = bounded_name(reason, self._reasons)
            self._reasons.add(shown)
            self._fallbacks.labels(shown).inc(blocks - before.fallbacks.get(reason, 0))
        self._differing.inc(now.differing_blocks - before.differing_blocks)
        self._damaged.inc(now.damaged_blocks - before.damaged_blocks)
        self._discarded.inc(now.discarded_blocks - before.discarded_blocks)
        self._sharing_failures.inc(now.sharing_failures - before.sharing_failures)
