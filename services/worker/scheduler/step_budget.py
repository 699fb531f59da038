"""How many tokens one engine step may compute, from the speed it showed so far. Pure."""

from __future__ import annotations

_LEAST_S = 1e-6
"""Steps are not believed to be shorter; keeps the speed finite where a clock did not move."""


class StepBudget:
    """Keeps steps that prefill within `step_s`, so that decodes and cancels beside them wait no longer.

    A step that used at least half of its budget tells the speed. A slower speed is believed at once, a faster one at
    most twofold a step, so that one odd measurement does not make a step far too long. Steps below half their budget
    (decodes, ends of prompts) are bound by reading weights, not by tokens: they can only raise the speed.
    """

    def __init__(self, *, step_s: float, least_tokens: int, most_tokens: int, first_tokens_per_s: float) -> None:
        self._step_s = step_s
        self._least_tokens = least_tokens
        self._most_tokens = most_tokens
        self.tokens_per_s = first_tokens_per_s

    @property
    def tokens(self) -> int:
        """The next step's bound."""
        return max(self._least_tokens, min(self._most_tokens, int(self.tokens_per_s * self._step_s)))

    def measured(self, tokens: int, elapsed_s: float) -> None:
        """A step that prefilled took `elapsed_s` for `tokens`, decodes included."""
        speed = tokens / max(elapsed_s, _LEAST_S)
        if speed > self.tokens_per_s or 2 * tokens >= self.tokens:
            self.tokens_per_s = min(speed, 2 * self.tokens_per_s)
