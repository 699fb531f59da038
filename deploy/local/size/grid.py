"""Which points of a grid of times to measure next. Pure.

    corners ─▶ the middle of each axis ─▶ where it is off from the line between its ends: the middles of both halves
            ─▶ all other points of the grid

The middles are measured at both ends of the other axis: a curve at one may be a line at the other. The same points in
the same order follow from the same times, so that a sweep that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Literal

Axis = Literal["x", "y"]
Place = tuple[int, int]


class TimeGrid:
    """The times measured so far, and the two axes on which they are wanted."""

    def __init__(self, xs: tuple[int, int], ys: tuple[int, int], *, step: Place, tolerance: float, most: int) -> None:
        """Begin with the ends of both axes. Values between them are multiples of `step`. An interval whose middle is
        off by less than `tolerance`, a share, is not divided further. The grid gets no further values where it would
        have more than `most` points."""
        self.seconds: dict[Place, float] = {}
        self.spread: dict[Place, float] = {}
        """By how much repetitions of a point differ, as a share: an interval whose middle is off by less is not divided
        either."""
        self._axes: dict[Axis, list[int]] = {"x": sorted(set(xs)), "y": sorted(set(ys))}
        self._ends: dict[Axis, frozenset[int]] = {"x": frozenset(xs), "y": frozenset(ys)}
        self._step: dict[Axis, int] = {"x": step[0], "y": step[1]}
        self._tolerance = tolerance
        self._most = most
        self._intervals: list[tuple[Axis, int, int]] = [("x", min(xs), max(xs)), ("y", min(ys), max(ys))]

    @property
    def left(self) -> int:
        """About how many points are to be measured."""
        xs, ys = self._axes["x"], self._axes["y"]
        return sum((x, y) not in self.seconds for x in xs for y in ys) + len(self._intervals)

    def next(self) -> Place | None:
        """Return the point to measure next. None if the grid is complete."""
        for x in sorted(self._ends["x"]):
            for y in sorted(self._ends["y"]):
                if (x, y) not in self.seconds:
                    return x, y
        while self._intervals:
            axis, low, high = self._intervals[0]
            middle = self._middle(axis, low, high)
            if middle is None or self._is_full(axis):
                self._intervals.pop(0)
                continue
            for place in self._edges(axis, middle):
                if place not in self.seconds:
                    return place
            self._intervals.pop(0)
            self._axes[axis] = sorted([*self._axes[axis], middle])
            if self._is_off(axis, low, middle, high):
                self._intervals.extend(((axis, low, middle), (axis, middle, high)))
        xs, ys = self._axes["x"], self._axes["y"]
        return next(((x, y) for x in xs for y in ys if (x, y) not in self.seconds), None)

    def places(self) -> list[Place]:
        """Return the places of the grid so far. All at its edges were measured, those inside perhaps not. Empty if a
        corner was not."""
        self.next()  # a value that was measured at both edges belongs to the grid
        xs, ys = self._axes["x"], self._axes["y"]
        if not all((x, y) in self.seconds for x in self._ends["x"] for y in self._ends["y"]):
            return []
        return [(x, y) for x in xs for y in ys]

    def filled(self, seconds: Mapping[Place, float]) -> list[tuple[int, int, float]]:
        """Return the times of these places. `seconds` has those that were measured; a place inside that was not has the
        time that follows from the edges."""
        return [
            (*place, seconds[place] if place in seconds else self._inside(place, seconds)) for place in self.places()
        ]

    def _inside(self, place: Place, seconds: Mapping[Place, float]) -> float:
        """Return the sum of the lines between both pairs of edges, less the plane between the corners. It is exact for
        times that are a sum of one by x, one by y, and one by their product. It is no less than the shortest edge."""
        (x0, *_, x1), (y0, *_, y1) = self._axes["x"], self._axes["y"]
        x, y = place
        across, along = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        edges = seconds[x0, y], seconds[x1, y], seconds[x, y0], seconds[x, y1]
        lines = edges[0] + across * (edges[1] - edges[0]) + edges[2] + along * (edges[3] - edges[2])
        low = seconds[x0, y0] + across * (seconds[x1, y0] - seconds[x0, y0])
        high = seconds[x0, y1] + across * (seconds[x1, y1] - seconds[x0, y1])
        return max(min(edges), lines - low - along * (high - low))

    def _edges(self, axis: Axis, value: int) -> list[Place]:
        """Return the points at this value of an axis and both ends of the other."""
        if axis == "x":
            return [(value, y) for y in sorted(self._ends["y"])]
        return [(x, value) for x in sorted(self._ends["x"])]

    def _is_full(self, axis: Axis) -> bool:
        longer, other = (len(self._axes[axis]) + 1), len(self._axes["y" if axis == "x" else "x"])
        return longer * other > self._most

    def _middle(self, axis: Axis, low: int, high: int) -> int | None:
        """Return the value between two, by their ratio if there is one. None if there is none."""
        step = self._step[axis]
        middle = round((sqrt(low * high) if low else high / 4) / step) * step
        return middle if low < middle < high else None

    def _is_off(self, axis: Axis, low: int, middle: int, high: int) -> bool:
        """Return whether the middle is not on the line between the two, at either end of the other axis."""
        for places in zip(*(self._edges(axis, value) for value in (low, middle, high)), strict=True):
            first, found, last = (self.seconds[place] for place in places)
            line = first + (middle - low) / (high - low) * (last - first)
            unsure = max(self._tolerance, *(self.spread.get(place, 0.0) for place in places))
            if abs(line - found) > unsure * found:
                return True
        return False
