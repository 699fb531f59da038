"""What a worker counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.worker.engine import EngineLoad, Stepped
from shared.messages import GenerateReply, Part, Refused

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """One worker's metrics; labels are few and bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("headrace_requests", "Attempts by outcome", ["outcome"], registry=registry)
        self._waiting = Gauge("headrace_queued_requests", "Attempts waiting", registry=registry)
        self._running = Gauge("headrace_inflight_requests", "Attempts running", registry=registry)
        self._steps = Counter("headrace_steps", "Engine steps", registry=registry)
        self._step_s = Histogram(
            "headrace_step_seconds", "Time of a step's arithmetic", buckets=_STEP_BUCKETS_S, registry=registry
        )
        self._computed = Counter("headrace_computed_tokens", "Tokens computed", registry=registry)
        self._prompt = Counter("headrace_prompt_tokens", "Prompt tokens of accepted attempts", registry=registry)
        self._cached = Counter("headrace_cached_tokens", "Prompt tokens found in the cache", registry=registry)
        self._output = Counter("headrace_output_tokens", "Tokens drawn", registry=registry)
        self._preemptions = Counter("headrace_preemptions", "Sequences whose blocks were taken", registry=registry)
        self._blocks = Gauge("headrace_blocks", "Device blocks by state", ["state"], registry=registry)
        self._events = Counter("headrace_kv_event_batches", "KV event batches published", registry=registry)
        self._frames = Counter("headrace_frames", "Step frames published", registry=registry)
        self._lost_frames = Counter("headrace_lost_frames", "Step frames dropped before sending", registry=registry)
        self._engine_starts = Counter("headrace_engine_starts", "Starts of the engine process", registry=registry)
        self._preempted = 0
        self._lost = 0

    def answered(self, reply: GenerateReply, prompt_tokens: int) -> None:
        """A Generate was accepted or refused."""
        if isinstance(reply, Refused):
            self._requests.labels(f"refused_{reply.code}").inc()
        else:
            self._prompt.inc(prompt_tokens)

    def part(self, part: Part) -> None:
        """A part goes to its frontend."""
        self._output.inc(len(part.tokens) // 4)
        if part.finish is not None:
            self._requests.labels(part.finish).inc()
            self._cached.inc(part.cached_tokens)

    def stepped(self, step: Stepped, capacity_blocks: int) -> None:
        """The engine made a step."""
        self._steps.inc()
        if step.tokens:
            self._step_s.observe(step.elapsed_s)
            self._computed.inc(step.tokens)
        if step.events:
            self._events.inc()
        self._preemptions.inc(step.load.preemptions - self._preempted)
        self._preempted = step.load.preemptions
        self._show(step.load, capacity_blocks)

    def engine_started(self) -> None:
        self._engine_starts.inc()
        self._preempted = 0

    def engine_lost(self) -> None:
        self._show(EngineLoad(), 0)

    def frame_sent(self) -> None:
        self._frames.inc()

    def frames_lost(self, total: int) -> None:
        """`total` frames since the start were dropped before they were sent."""
        self._lost_frames.inc(total - self._lost)
        self._lost = total

    def _show(self, load: EngineLoad, capacity_blocks: int) -> None:
        self._waiting.set(load.waiting)
        self._running.set(load.running)
        self._blocks.labels("held").set(load.held_blocks)
        self._blocks.labels("cached").set(load.cached_blocks)
        self._blocks.labels("free").set(capacity_blocks - load.held_blocks - load.cached_blocks)
