"""Ranks the paths that a group of blocks may take by their measured cost. Pure.

A path costs its own time plus the time by which it delays a step that runs at the same time, because requests wait for
both. On an H200 a kernel that writes host memory delays a step by half of its own time, and a DMA copy by a hundredth.
So the kernel must be 1.5 times as fast as the copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from msgspec import Struct

Step = tuple[int, tuple[str, ...]]
"""The paths, best first, for groups of at least this number of blocks."""


class PathTiming(Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a group of `blocks` on one path, in one direction."""

    path: str
    loads: bool
    blocks: int
    took_s: float
    """Seconds that the group takes by itself."""
    taken_s: float = 0.0
    """Seconds by which it delays a step that reads memory all the time."""

    @property
    def cost_s(self) -> float:
        return self.took_s + self.taken_s


class PathChoice:
    """The order of paths for each direction and number of blocks."""

    def __init__(self, steps: Mapping[bool, Sequence[Step]], measured: Sequence[PathTiming] = ()) -> None:
        """`steps` has an ascending list for each direction; the key is whether it loads."""
        self.measured = measured
        self._steps = steps

    @staticmethod
    def cheapest(measured: Sequence[PathTiming]) -> PathChoice:
        """Rank paths by cost. `measured` has at least one path for each direction."""
        return PathChoice({loads: _steps(measured, loads) for loads in (False, True)}, measured)

    @staticmethod
    def forced(path: str, offered: Sequence[str]) -> PathChoice:
        """Rank `path` first, always; the other `offered` paths follow, in their order."""
        order = (path, *(other for other in offered if other != path))
        return PathChoice({loads: [(1, order)] for loads in (False, True)})

    def order(self, blocks: int, *, loads: bool) -> tuple[str, ...]:
        """Return the paths for a group of `blocks`, best first.

        The order is that of the largest measured group that is not larger, or of the smallest group.
        """
        assert blocks > 0
        steps = self._steps[loads]
        return steps[max(0, bisect_right(steps, blocks, key=lambda step: step[0]) - 1)][1]

    def table(self) -> list[str]:
        """Return the measurements as text, a line for each direction and size, best first.

        A path's numbers are its own µs + the µs by which it delays a step.
        """
        return [
            f"{'load' if loads else 'save'} {blocks}: "
            + ", ".join(f"{row.path} {row.took_s * 1e6:.1f} + {row.taken_s * 1e6:.1f}" for row in rows)
            for loads in (False, True)
            for blocks, rows in _ranked(self.measured, loads)
        ]


def _steps(measured: Sequence[PathTiming], loads: bool) -> list[Step]:
    steps = [(blocks, tuple(row.path for row in rows)) for blocks, rows in _ranked(measured, loads)]
    assert steps
    return steps


def _ranked(measured: Sequence[PathTiming], loads: bool) -> list[tuple[int, list[PathTiming]]]:
    sizes = sorted({row.blocks for row in measured if row.loads == loads})
    return [
        (
            blocks,
            sorted((row for row in measured if (row.loads, row.blocks) == (loads, blocks)), key=lambda row: row.cost_s),
        )
        for blocks in sizes
    ]
