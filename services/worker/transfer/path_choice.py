"""Which path a group of blocks takes, by what was measured. Pure.

A kernel that touches host memory slows what computes beside it 1.4 to 5.4 times (H200), copies by DMA by 1 to 9 %: so
it must be KERNEL_MARGIN times as fast as the best of those to be taken.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct

KERNEL_MARGIN = 2.0
KERNEL = "zero_copy"


class Measured(Struct, frozen=True):
    """One path, one direction: a group of `blocks` takes `took_s`."""

    path: str
    loads: bool
    blocks: int
    took_s: float


class PathChoice:
    """By the direction and the number of blocks."""

    def __init__(self, measured: list[Measured]) -> None:
        """At least one path for each direction."""
        self.measured = measured
        self._steps = {loads: _steps(measured, loads) for loads in (False, True)}

    def path(self, blocks: int, *, loads: bool) -> str:
        """As for the largest measured group that has no more blocks; the smallest, if none has."""
        assert blocks > 0
        steps = self._steps[loads]
        return steps[max(0, bisect_right(steps, blocks, key=lambda step: step[0]) - 1)][1]


def _steps(measured: list[Measured], loads: bool) -> list[tuple[int, str]]:
    sizes = sorted({row.blocks for row in measured if row.loads == loads})
    assert sizes
    return [
        (blocks, _best([row for row in measured if (row.loads, row.blocks) == (loads, blocks)])) for blocks in sizes
    ]


def _best(rows: list[Measured]) -> str:
    copies = [row for row in rows if row.path != KERNEL] or rows
    best = min(copies, key=lambda row: row.took_s)
    kernels = [row for row in rows if row.path == KERNEL and row.took_s * KERNEL_MARGIN < best.took_s]
    return kernels[0].path if kernels else best.path
