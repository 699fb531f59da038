"""Measured seconds on a grid, and what lies between them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Point = tuple[float, float, float]
"""Two values, and the seconds that were measured for them."""


class MeasuredTimes:
    """Seconds by two values. They are interpolated linearly in both directions; below the grid its edge holds, above it
    the last slope goes on."""

    def __init__(self, points: Sequence[Point], name: str) -> None:
        """Raise ValueError, which begins with `name`, if the points are no complete grid."""
        self._seconds = {(x, y): seconds for x, y, seconds in points}
        self._xs = sorted({x for x, _, _ in points})
        self._ys = sorted({y for _, y, _ in points})
        if not points:
            raise ValueError(f"{name}: no times")
        if len(self._seconds) < len(points):
            raise ValueError(f"{name}: two times for the same values")
        missing = next(((x, y) for x in self._xs for y in self._ys if (x, y) not in self._seconds), None)
        if missing is not None:
            raise ValueError(f"{name}: no time for {missing[0]:g}, {missing[1]:g}; all combinations are needed")
        for (x, y), seconds in self._seconds.items():
            if not (0 <= x < float("inf") and 0 <= y < float("inf") and 0 < seconds < float("inf")):
                raise ValueError(f"{name}: [{x:g}, {y:g}, {seconds:g}] is out of range")

    @property
    def least(self) -> float:
        """The lowest value in the first direction."""
        return self._xs[0]

    def at(self, x: float, y: float) -> float:
        """Return seconds, never less than the shortest of the measured times around the place."""
        x0, x1, across = _between(self._xs, x)
        y0, y1, along = _between(self._ys, y)
        s = self._seconds
        low = s[x0, y0] + along * (s[x0, y1] - s[x0, y0])
        high = s[x1, y0] + along * (s[x1, y1] - s[x1, y0])
        return max(low + across * (high - low), min(s[x0, y0], s[x0, y1], s[x1, y0], s[x1, y1]))


def _between(marks: Sequence[float], value: float) -> tuple[float, float, float]:
    """Return the two marks around `value` (above the last mark: the last two), and where it lies between them: 0 at the
    first, 1 at the second."""
    if len(marks) == 1 or value <= marks[0]:
        return marks[0], marks[0], 0.0
    index = min(bisect_right(marks, value), len(marks) - 1)
    below, above = marks[index - 1], marks[index]
    return below, above, (value - below) / (above - below)
