"""QueueClock: for what the sequences of a queue wait, and how long. Pure.

The head of the queue is never overtaken, so whatever holds it up holds up all after it. One clock for each cause runs
while that cause does, and a sequence reads all clocks when it is queued and when it is admitted: O(1) for a step and
for a sequence.
"""

from __future__ import annotations

from typing import Literal

Cause = Literal["blocks", "places", "tokens"]
"""Too few blocks are free; `max_running` sequences run; the step's tokens go to others."""
CAUSES: tuple[Cause, ...] = ("blocks", "places", "tokens")
WaitTimes = tuple[float, float, float]
"""Seconds, in the order of CAUSES."""
NO_WAIT: WaitTimes = (0.0, 0.0, 0.0)
LEAST_S = 0.0005
"""Shorter parts of a wait are left out of its description."""
_SHOWN = ("for free blocks", "for a place among the running ones", "for its share of the steps' tokens")


def describe_wait(seconds: float, waited_s: WaitTimes = NO_WAIT) -> str:
    """Return how long something waited, and how much of that for what."""
    parts = [f"{_time(each)} {what}" for each, what in zip(waited_s, _SHOWN, strict=True) if each >= LEAST_S]
    return f"{_time(seconds)} ({', '.join(parts)})" if parts else _time(seconds)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


class QueueClock:
    """Times are seconds on one clock."""

    def __init__(self) -> None:
        self._totals = list(NO_WAIT)
        self._cause: int | None = None
        self._since_s = 0.0

    def set(self, cause: Cause | None, now_s: float) -> None:
        """From now on the queue waits for this. None means for nothing that has a clock, such as the step under way."""
        self._advance(now_s)
        self._cause = None if cause is None else CAUSES.index(cause)

    def read(self, now_s: float) -> WaitTimes:
        """Return the seconds on each clock."""
        self._advance(now_s)
        blocks, places, tokens = self._totals
        return blocks, places, tokens

    def since(self, before: WaitTimes, now_s: float) -> WaitTimes:
        """Return the seconds on each clock since it was read."""
        blocks, places, tokens = self.read(now_s)
        return blocks - before[0], places - before[1], tokens - before[2]

    def _advance(self, now_s: float) -> None:
        if self._cause is not None:
            self._totals[self._cause] += max(0.0, now_s - self._since_s)
        self._since_s = max(now_s, self._since_s)
