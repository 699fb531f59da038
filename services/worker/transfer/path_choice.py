"""Which paths a group of blocks may take, best first, by what was measured. Pure.

A path costs its own time, and the time by which a step that computes beside it ends later: seconds for which somebody
waits, both. So a kernel that writes host memory, which on an H200 takes half of its time from the step, must be 1.5
times as fast as a copy by DMA, which takes a hundredth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from msgspec import Struct

Step = tuple[int, tuple[str, ...]]
"""From so many blocks on: the paths, best first."""


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """One path, one direction: a group of `blocks`."""

    path: str
    loads: bool
    blocks: int
    took_s: float
    """Alone."""
    taken_s: float = 0.0
    """From a step beside it that reads memory all the time."""

    @property
    def cost_s(self) -> float:
        return self.took_s + self.taken_s


class PathChoice:
    """By the direction and the number of blocks."""

    def __init__(self, steps: Mapping[bool, Sequence[Step]], measured: Sequence[Measured] = ()) -> None:
        """`steps` of both directions, ascending."""
        self.measured = measured
        self._steps = steps

    @staticmethod
    def cheapest(measured: Sequence[Measured]) -> PathChoice:
        """At least one path for each direction."""
        return PathChoice({loads: _steps(measured, loads) for loads in (False, True)}, measured)

    @staticmethod
    def forced(path: str, offered: Sequence[str]) -> PathChoice:
        """Always `path`, and where it fails the others in their order."""
        order = (path, *(other for other in offered if other != path))
        return PathChoice({loads: [(1, order)] for loads in (False, True)})

    def order(self, blocks: int, *, loads: bool) -> tuple[str, ...]:
        """As for the largest measured group that has no more blocks; the smallest, if none has."""
        assert blocks > 0
        steps = self._steps[loads]
        return steps[max(0, bisect_right(steps, blocks, key=lambda step: step[0]) - 1)][1]

    def table(self) -> list[str]:
        """What was measured, a line for each direction and size, best first: µs + µs taken from a step beside."""
        return [
            f"{'load' if loads else 'save'} {blocks}: "
            + ", ".join(f"{row.path} {row.took_s * 1e6:.1f} + {row.taken_s * 1e6:.1f}" for row in rows)
            for loads in (False, True)
            for blocks, rows in _ranked(self.measured, loads)
        ]


def _steps(measured: Sequence[Measured], loads: bool) -> list[Step]:
    steps = [(blocks, tuple(row.path for row in rows)) for blocks, rows in _ranked(measured, loads)]
    assert steps
    return steps


def _ranked(measured: Sequence[Measured], loads: bool) -> list[tuple[int, list[Measured]]]:
    sizes = sorted({row.blocks for row in measured if row.loads == loads})
    return [
        (
            blocks,
            sorted((row for row in measured if (row.loads, row.blocks) == (loads, blocks)), key=lambda row: row.cost_s),
        )
        for blocks in sizes
    ]
