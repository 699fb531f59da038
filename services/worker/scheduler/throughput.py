"""How fast an engine is in the long run: what routers compare engines by. Pure."""

from __future__ import annotations

from math import exp

_MEMORY_S = 60.0
"""Of prefilling: steps further back hardly count."""
_LEAST_S = 1e-6
_RECENT = 1 / 16
"""Of the latest step, in the moving average of what decodes take."""


class Pace:
    """Tokens over seconds of all steps that prefilled, older ones counting less.

    One step's speed says little: long contexts, decodes beside, and short ends of prompts make it differ threefold on
    one engine. Routers that believed it would send prompts away from where they are cached for nothing.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.step_s = 0.0
        """What a step that only decodes takes lately; 0 before the first."""

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def measured(self, tokens: int, elapsed_s: float) -> None:
        """A step that prefilled, decodes included."""
        kept = exp(-elapsed_s / _MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + max(elapsed_s, _LEAST_S)

    def decoded(self, elapsed_s: float) -> None:
        """A step that only decoded."""
        weight = _RECENT if self.step_s else 1.0
        self.step_s += weight * (elapsed_s - self.step_s)
