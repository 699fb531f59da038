"""EngineStats: a worker's load from the statistics that vLLM keeps of each step. Pure."""

from __future__ import annotations

from services.worker.contracts.messages import EngineLoad
from services.worker.scheduler.throughput import Throughput
from services.worker.vllm.kv_transfer import ImageCounts

_FULL_TOKENS = 512
"""Tokens of prompts from which a step counts as full; vLLM does not say what it could have had."""


class EngineStats:
    """The counts and the speed of one engine, after each of its steps."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._throughput = Throughput()
        self._last_s: float | None = None
        """When the last step ended; None if nothing ran after it."""
        self._prefill_s = 0.0
        """Seconds of steps that yielded nothing yet: parts of long prompts."""
        self.running = 0
        self.waiting = 0
        self._held_blocks = 0
        self.preemptions = 0
        self.prefetched_blocks = 0
        """Blocks that were loaded for expected prompts, since the start."""
        self.images = ImageCounts()
        """What has become of images. All 0 unless their embeddings are exchanged with the kvbm."""
        self._queried_tokens = self._found_tokens = 0
        self.steps = 0
        self._step_tokens = 0
        self._elapsed_s = 0.0

    def record_step(
        self,
        now_s: float,
        *,
        running: int,
        waiting: int,
        usage: float,
        prefilled_tokens: int,
        decoded_tokens: int,
        preempted: int,
        queried_tokens: int = 0,
        found_tokens: int = 0,
    ) -> None:
        """Record a step that ended now. `usage` is the share (0 … 1) of blocks that requests use; `prefilled_tokens`
        are those of prompts that had their first token in it, without cached ones; `decoded_tokens` are all its output
        tokens. `found_tokens` of the `queried_tokens` of its new prompts were in the prefix cache."""
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s if running or waiting else None
        self.running, self.waiting = running, waiting
        self._held_blocks = round(usage * self._capacity_blocks)
        self.preemptions += preempted
        self._queried_tokens += queried_tokens
        self._found_tokens += found_tokens
        self.steps += 1
        self._step_tokens += prefilled_tokens + decoded_tokens
        self._elapsed_s += elapsed_s
        if prefilled_tokens:
            if elapsed_s:
                tokens, prefill_s = prefilled_tokens + decoded_tokens, elapsed_s + self._prefill_s
                self._throughput.record_prefill(tokens, prefill_s, now_s, full=prefilled_tokens >= _FULL_TOKENS)
            self._prefill_s = 0.0
        elif not decoded_tokens:
            self._prefill_s += elapsed_s
        elif elapsed_s:
            self._throughput.record_decode(elapsed_s)

    def begin(self, now_s: float) -> None:
        """Note that work came: if none ran, the next step's time counts from now."""
        if self._last_s is None:
            self._last_s = now_s

    def take_step_counts(self) -> tuple[int, float]:
        """Return the tokens and the seconds of the steps since the last call."""
        counts = self._step_tokens, self._elapsed_s
        self._step_tokens, self._elapsed_s = 0, 0.0
        return counts

    def load(self, *, unbegun_tokens: int, cached_blocks: int) -> EngineLoad:
        """Return the load. `cached_blocks` counts all blocks with reusable content, also those that requests use."""
        return EngineLoad(
            waiting=self.waiting,
            running=self.running,
            waiting_tokens=unbegun_tokens,
            held_blocks=self._held_blocks,
            cached_blocks=max(0, min(cached_blocks, self._capacity_blocks - self._held_blocks)),
            prefill_tokens_per_s=self._throughput.tokens_per_s,
            step_s=self._throughput.step_s,
            preemptions=self.preemptions,
            queried_tokens=self._queried_tokens,
            found_tokens=self._found_tokens,
            prefetched_blocks=self.prefetched_blocks,
            encoder_hits=self.images.hits,
            encoded_images=self.images.encoded,
            fetched_images=self.images.fetched,
            encoder_entries=self.images.entries,
            encoder_bytes=self.images.size_bytes,
            image_s=self.images.image_s,
        )
