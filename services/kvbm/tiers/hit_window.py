"""Counts how many blocks were found lately, in a window that slides in steps. Pure.

|  step  |  step  | … |  step  |        each is counted by itself; the oldest is dropped as one
 └────────── window ──────────┘
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

STEPS = 60


class LookupCounts(Struct, frozen=True):
    """How many blocks fetches asked for, and in which tier they were found."""

    lookups: int = 0
    asked: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: LookupCounts) -> LookupCounts:
        return LookupCounts(
            self.lookups + other.lookups, self.asked + other.asked, self.host + other.host, self.disk + other.disk
        )

    def rate(self, blocks: int) -> float | None:
        """Return `blocks` as a share of the blocks asked for; None if none was asked for."""
        return blocks / self.asked if self.asked else None


class HitWindow:
    """Counts lookups of the last `window_s` seconds, to within a sixtieth. `now_s` is any clock that never goes
    back."""

    def __init__(self, window_s: float) -> None:
        self._step_s = window_s / STEPS
        self._steps: deque[tuple[int, LookupCounts]] = deque()
        """Number and counts of each step that is not empty, oldest first."""

    def add(self, found: LookupCounts, now_s: float) -> None:
        """Count one more lookup, or several."""
        step = int(now_s / self._step_s)
        if self._steps and self._steps[-1][0] == step:
            found += self._steps.pop()[1]
        self._steps.append((step, found))
        self._forget(step)

    def total(self, now_s: float) -> LookupCounts:
        """Return the counts of the window that ends now."""
        self._forget(int(now_s / self._step_s))
        return sum((found for _, found in self._steps), LookupCounts())

    def _forget(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - STEPS:
            self._steps.popleft()

    def validate(self) -> None:
        """Raise AssertionError if the window contradicts itself."""
        numbers = [step for step, _ in self._steps]
        assert numbers == sorted(set(numbers)), "steps out of order"
        assert len(numbers) <= STEPS, f"{len(numbers)} steps"
        assert all(found.host + found.disk <= found.asked for _, found in self._steps), "more was found than asked for"
