"""What a worker counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.engine import EngineLoad, Stepped
from shared.messages import GenerateReply, Part, Refused
from shared.metrics import STEP_SECONDS, counter, gauge, histogram


class Metrics:
    """One worker's metrics; labels are few and bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = counter(registry, "headrace_requests", "Attempts by outcome", ["outcome"])
        self._waiting = gauge(registry, "headrace_queued_requests", "Attempts waiting")
        self._running = gauge(registry, "headrace_inflight_requests", "Attempts running")
        self._steps = counter(registry, "headrace_engine_steps", "Engine steps")
        self._step_s = histogram(registry, "headrace_step_seconds", "Time of a step's arithmetic", STEP_SECONDS)
        self._computed = counter(registry, "headrace_computed_tokens", "Tokens computed")
        self._prompt = counter(registry, "headrace_prompt_tokens", "Prompt tokens of accepted attempts")
        self._cached = counter(registry, "headrace_cached_tokens", "Prompt tokens found in the cache")
        self._output = counter(registry, "headrace_output_tokens", "Tokens drawn")
        self._preemptions = counter(registry, "headrace_preemptions", "Sequences whose blocks were taken")
        self._blocks = gauge(registry, "headrace_blocks", "Device blocks by state", ["state"])
        self._events = counter(registry, "headrace_event_batches", "KV event batches published")
        self._frames = counter(registry, "headrace_frames", "Step frames published")
        self._lost_frames = counter(registry, "headrace_lost_frames", "Step frames dropped before they were sent")
        self._engine_starts = counter(registry, "headrace_engine_starts", "Starts of the engine that got ready")
        self._preempted = 0
        self._lost = 0

    def answered(self, reply: GenerateReply, prompt_tokens: int) -> None:
        """A Generate was accepted or refused."""
        if isinstance(reply, Refused):
            self._requests.labels(f"refused_{reply.code}").inc()
        else:
            self._prompt.inc(prompt_tokens)

    def part(self, part: Part) -> None:
        """An attempt begins or ends."""
        self._output.inc(len(part.tokens) // 4)
        if part.finish is not None:
            self._requests.labels(part.finish).inc()
            self._cached.inc(part.cached_tokens)

    def stepped(self, step: Stepped, capacity_blocks: int) -> None:
        """The engine made a step."""
        self._steps.inc()
        self._output.inc(len(step.advanced))
        if step.tokens:
            self._step_s.observe(step.elapsed_s)
            self._computed.inc(step.tokens)
        if step.event_batch:
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
