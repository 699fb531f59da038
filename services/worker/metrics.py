"""WorkerMetrics: what a worker counts."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import EngineLoad, Stepped
from shared.messages.frames import NOT_BEGUN, Part
from shared.messages.generate import GenerateReply, Refused
from shared.metrics import REQUEST_SECONDS, STEP_SECONDS, TOKENS, counter, gauge, histogram, register_metrics


@dataclass(slots=True)
class _Steps:
    steps: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    event_batches: int = 0
    frames: int = 0
    load: EngineLoad | None = None
    """The engine's counts after the last of these steps."""
    capacity_blocks: int = 0


class WorkerMetrics:
    """One worker's metrics; labels are few and bounded.

    Numbers that every step changes are summed up here and published with each load report, every 250 ms: eleven updates
    of metrics were a quarter of what a step cost the shell.
    """

    # fmt: off
    _requests = counter("headrace_requests", "outcome",
        "Attempts by outcome",
        "`error`, `refused_…`: the worker's log says why. `not_begun` are attempts that waited too long: too few "
        "workers.")
    _waiting = gauge("headrace_queued_requests", "",
        "Attempts waiting", "Too few workers, or too little memory for KV.")
    _running = gauge("headrace_inflight_requests", "", "Attempts running", "It is bounded by `worker.max_running`.")
    _oldest = gauge("headrace_oldest_queued_request_seconds", "",
        "Age of the attempt that has waited longest for its first token. 0 if none waits",
        "As `headrace_queued_requests`; or one request is too large to be begun.")
    _queue_s = histogram("headrace_queue_seconds", "", REQUEST_SECONDS,
        "Time of an attempt from its arrival to the first step that computes it", "Too few workers.")
    _prefill_s = histogram("headrace_prefill_seconds", "", REQUEST_SECONDS,
        "Time of an attempt from the first step that computes it to its first token", "Long prompts, or too few hits.")
    _prefill_tokens = histogram("headrace_prefill_step_tokens", "", TOKENS, "Tokens of a step that computes prompts")
    _load_s = gauge("headrace_model_load_seconds", "",
        "Time that the engine took to start, its model included", "A slow disk.")
    _restarts = counter("headrace_engine_restarts", "",
        "Engines lost, after each of which one is started", "The worker's log and /health say why each was lost.")
    _steps = counter("headrace_engine_steps", "", "Engine steps")
    _step_s = histogram("headrace_step_seconds", "", STEP_SECONDS,
        "Seconds of a step's arithmetic", "Too many requests in a step, or a slow device.")
    _computed = counter("headrace_computed_tokens", "", "Tokens computed")
    _prompt = counter("headrace_prompt_tokens", "", "Prompt tokens of accepted attempts")
    _cached = counter("headrace_cached_tokens", "tier",
        "Prompt tokens found in the cache, by the tier that they came from", "The higher the better.")
    _output = counter("headrace_output_tokens", "", "Tokens drawn")
    _preemptions = counter("headrace_preemptions", "",
        "Sequences preempted: their blocks were needed by others, and they waited again",
        "Too little memory for KV: raise `worker.capacity_bytes`, or lower `worker.max_running`.")
    _overtaken = counter("headrace_overtaken", "",
        "How often a prompt was computed before one that had come earlier, as it is shorter",
        "Long prompts wait too long: lower `worker.overtaking`.")
    _not_finite = counter("headrace_not_finite_sequences", "outcome",
        "Sequences whose numbers were not finite: computed once more (recomputed), and not finite again (failed)",
        "Suspect the GPU, or the model's files.")
    _images = counter("headrace_images", "outcome",
        "Images of prompts whose embeddings were in the encoder cache (hit), came from kvbm (kvbm), or were computed "
        "(encoded)",
        "Many are encoded that come again: raise `worker.encoder_cache_bytes`.")
    _pictures = counter("headrace_pictures", "", "Pictures and videos made")
    _picture_steps = counter("headrace_picture_steps", "",
        "Denoising steps of pictures and videos; one of several pictures counts for each",
        "Divided by `headrace_pictures`, the steps that a picture took.")
    _encoder_images = gauge("headrace_encoder_cache_images", "", "Images whose embeddings are in the encoder cache")
    _encoder_bytes = gauge("headrace_encoder_cache_bytes", "",
        "Bytes of the embeddings in the encoder cache", "It is bounded by `worker.encoder_cache_bytes`.")
    _blocks = gauge("headrace_blocks", "state",
        "Device blocks by state", "`free` and `cached` near 0: attempts are preempted.")
    _events = counter("headrace_event_batches", "", "KV event batches published")
    _frames = counter("headrace_frames", "", "Step frames published")
    _lost_frames = counter("headrace_lost_frames", "",
        "Step frames dropped before they were sent",
        "NATS was away, or a payload was too large. Frontends ask for them again.")
    _engine_starts = counter("headrace_engine_starts", "", "Starts of the engine after which it was ready")
    _standby_ready = gauge("headrace_standby_ready", "",
        "1 if an engine stands by and can take over, else 0",
        "0 for long where `worker.standby` is set: the worker's log says why it does not start.")
    _take_overs = counter("headrace_standby_take_overs", "",
        "How often a standby has taken over from an engine that was lost")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        register_metrics(self, registry)
        self._shown = EngineLoad()
        """The engine's counts as they were published last."""
        self._lost = 0
        self._taken_over = 0
        self._since = _Steps()
        self._output_tokens = 0

    def count_reply(self, reply: GenerateReply, prompt_tokens: int) -> None:
        """Count a Generate that was accepted or refused."""
        if isinstance(reply, Refused):
            self._requests.labels(f"refused_{reply.code}").inc()
        else:
            self._prompt.inc(prompt_tokens)

    @property
    def output_tokens(self) -> int:
        """The number of tokens drawn so far."""
        return self._output_tokens + self._since.output_tokens

    def count_part(self, part: Part) -> None:
        """Count the first or the last part of an attempt."""
        self._output_tokens += len(part.tokens) // 4
        self._output.inc(len(part.tokens) // 4)
        if part.finish is not None:
            self._requests.labels("not_begun" if part.error.startswith(NOT_BEGUN) else part.finish).inc()
            below = part.cached_host_tokens + part.cached_disk_tokens
            self._cached.labels("device").inc(part.cached_tokens - below)
            self._cached.labels("host").inc(part.cached_host_tokens)
            self._cached.labels("disk").inc(part.cached_disk_tokens)

    def count_step(self, step: Stepped, load: EngineLoad, capacity_blocks: int) -> None:
        """Count a step, or some short ones, which count with their mean. `load` and `capacity_blocks` are sums over all
        ranks."""
        since = self._since
        since.steps += step.steps
        since.output_tokens += len(step.one_token_attempts)
        since.event_batches += bool(step.event_batch)
        for begun in step.begun:
            self._queue_s.observe(begun.queued_s)
            self._prefill_s.observe(begun.prefill_s)
        if step.tokens:
            if step.tokens > len(step.one_token_attempts) + len(step.boundary_parts):
                self._prefill_tokens.observe(step.tokens)
            since.computed_tokens += step.tokens
            for _ in range(step.steps):
                self._step_s.observe(step.elapsed_s / step.steps)
        since.load, since.capacity_blocks = load, capacity_blocks

    def count_frame(self) -> None:
        self._since.frames += 1

    def publish(self, oldest_s: float = 0.0) -> None:
        """Add what was counted since the last call to the metrics. `oldest_s` is the age of the attempt that has waited
        longest."""
        self._oldest.set(oldest_s)
        since, self._since = self._since, _Steps()
        self._steps.inc(since.steps)
        self._output.inc(since.output_tokens)
        self._output_tokens += since.output_tokens
        self._computed.inc(since.computed_tokens)
        self._events.inc(since.event_batches)
        self._frames.inc(since.frames)
        if since.load is not None:
            load, shown, self._shown = since.load, self._shown, since.load
            self._preemptions.inc(load.preemptions - shown.preemptions)
            self._overtaken.inc(load.overtaken - shown.overtaken)
            self._not_finite.labels("recomputed").inc(load.recomputed - shown.recomputed)
            self._not_finite.labels("failed").inc(load.not_finite - shown.not_finite)
            self._images.labels("hit").inc(load.encoder_hits - shown.encoder_hits)
            self._images.labels("kvbm").inc(load.fetched_images - shown.fetched_images)
            self._images.labels("encoded").inc(load.encoded_images - shown.encoded_images)
            self._pictures.inc(load.pictures - shown.pictures)
            self._picture_steps.inc(load.picture_steps - shown.picture_steps)
            self._show(since.load, since.capacity_blocks)

    def engine_started(self, took_s: float) -> None:
        """Count an engine that was ready `took_s` after it was started."""
        self._engine_starts.inc()
        self._load_s.set(took_s)
        self._shown = EngineLoad()

    def engine_lost(self, *, counts: bool = True) -> None:
        """An engine has ended. It does not count if it was stopped."""
        self._restarts.inc(counts)
        self.publish()
        self._show(EngineLoad(), 0)

    def show_standby(self, *, ready: bool, take_overs: int) -> None:
        """Show whether an engine stands by, and that `take_overs` have taken over since the worker started."""
        self._standby_ready.set(ready)
        self._take_overs.inc(take_overs - self._taken_over)
        self._taken_over = take_overs

    def count_lost_frames(self, total: int) -> None:
        """Count lost frames: `total` since the start were dropped before they were sent."""
        self._lost_frames.inc(total - self._lost)
        self._lost = total

    def _show(self, load: EngineLoad, capacity_blocks: int) -> None:
        self._waiting.set(load.waiting)
        self._running.set(load.running)
        self._encoder_images.set(load.encoder_entries)
        self._encoder_bytes.set(load.encoder_bytes)
        self._blocks.labels("held").set(load.held_blocks)
        self._blocks.labels("cached").set(load.cached_blocks)
        self._blocks.labels("free").set(max(0, capacity_blocks - load.held_blocks - load.cached_blocks))
