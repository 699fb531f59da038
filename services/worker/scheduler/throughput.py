"""How fast an engine is: `StepBudget` bounds its next step by it, and routers compare engines by their `Throughput`.
Pure.
"""

from __future__ import annotations

from math import exp, inf

from services.worker.limits import DECODE_STRETCH

_LEAST_S = 1e-6
"""Steps are assumed to take at least these seconds, which keeps a speed finite where the clock did not move."""
_MEMORY_S = 60.0
"""Seconds of prefilling after which a step counts only 1/e in the throughput."""
_PAUSE_S = 30.0
"""Seconds without a full step after which the next one counts for at least half. Shorter than
`services.router.selection.load.SPEED_S`, after which a router tries a slow worker again."""
_RECENT = 1 / 16
"""Weight of the latest step in the moving average of the time that decodes take."""


class StepBudget:
    """How many tokens one engine step may compute.

    It keeps steps that prefill within `step_s`, and within the longer of `short_step_s` and `DECODE_STRETCH` times what
    decoding alone takes, so that decodes in the same step, and cancels, wait no longer. A step with one prompt and
    nothing else may take `lone_step_s`: shorter ones would only compute it more slowly.

    A step that used at least half of its budget shows the speed. A slower speed counts at once, a faster one at most
    twofold a step, so that one odd measurement does not make a step far too long. Steps below half their budget
    (decodes, ends of prompts) are bound by reading weights, not by tokens: they can only raise the speed. For the
    throughput the same holds of steps that used less than half of what decodes had left of their budget.
    """

    def __init__(
        self,
        *,
        step_s: float,
        least_tokens: int,
        most_tokens: int,
        first_tokens_per_s: float,
        short_step_s: float = inf,
        lone_step_s: float = 0.0,
    ) -> None:
        self.throughput = Throughput()
        """The engine's speed in the long run, by the same steps."""
        self._step_s = step_s
        self._short_step_s = short_step_s
        self._lone_step_s = lone_step_s
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens
        self.tokens_per_s = first_tokens_per_s

    @property
    def tokens(self) -> int:
        """How many tokens the next step may compute."""
        return self._tokens_in(min(self._step_s, max(self._short_step_s, DECODE_STRETCH * self.throughput.step_s)))

    @property
    def lone_tokens(self) -> int:
        """How many tokens the next step may compute if they are of one prompt, and there is nothing else."""
        return max(self.tokens, self._tokens_in(self._lone_step_s))

    def _tokens_in(self, step_s: float) -> int:
        return max(self._least_tokens, min(self._most_tokens, int(self.tokens_per_s * step_s)))

    def expected_s(self, tokens: int, sequences: int) -> float:
        """Return the seconds that a step of `tokens` tokens of `sequences` will take, by those before it. 0 if not
        known."""
        prefill_s = tokens / self.tokens_per_s if tokens > sequences else 0.0
        return max(self.throughput.step_s, prefill_s)

    def record_step(self, tokens: int, sequences: int, elapsed_s: float, ended_s: float) -> None:
        """Learn from a step that ended at `ended_s`: it took `elapsed_s` for `tokens` tokens of `sequences`."""
        if tokens > sequences:
            speed, budget = tokens / max(elapsed_s, _LEAST_S), self.tokens
            if speed > self.tokens_per_s or 2 * tokens >= budget:
                self.tokens_per_s = min(speed, 2 * self.tokens_per_s)
            full = 2 * (tokens - sequences) >= budget - sequences
            self.throughput.record_prefill(tokens, elapsed_s, ended_s, full=full)
        elif sequences:
            self.throughput.record_decode(elapsed_s)


class Throughput:
    """The engine's speed in the long run: tokens over seconds of steps that prefilled, older ones counting less.

    One step's speed says little: long contexts, decodes in the same step, and short ends of prompts make it differ
    threefold on one engine. Routers that believed it would send prompts away from where they are cached for nothing. A
    step that is not full, with few tokens of prompts, can only raise the speed: a worker that decodes what others hand
    over computes little else, and would look slow for whole prompts. After a pause, what was measured before counts for
    no more than the next full step: a worker that looks slow gets few prompts, and each must tell.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._full_s = -inf
        """When the last full step ended."""
        self.step_s = 0.0
        """Seconds that a step which only decodes takes lately; 0 before the first."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of steps that prefill; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def record_prefill(self, tokens: int, elapsed_s: float, ended_s: float, *, full: bool) -> None:
        """Learn from a step that prefilled and ended at `ended_s`: it took `elapsed_s` for `tokens`, decodes included.
        `full`: it had enough tokens of prompts to show the speed."""
        elapsed_s = max(elapsed_s, _LEAST_S)
        if not full and tokens < self.tokens_per_s * elapsed_s:
            return
        kept = exp(-elapsed_s / _MEMORY_S)
        if full:
            if self._seconds and ended_s - elapsed_s - self._full_s >= _PAUSE_S:
                kept = min(kept, elapsed_s / self._seconds)
            self._full_s = ended_s
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + elapsed_s

    def record_decode(self, elapsed_s: float) -> None:
        """Learn from a step that only decoded: it took `elapsed_s`."""
        weight = _RECENT if self.step_s else 1.0
        self.step_s += weight * (elapsed_s - self.step_s)
