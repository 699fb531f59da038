"""Plans into how many splits each decoding row's context is cut, from the lengths of all rows of the step.

    rows of a step    8 192 positions            500         300         padding
    their splits      ▪▪▪▪▪▪▪▪▪▪ … ▪▪▪▪▪▪▪▪▪▪    ▪▪          ▪▪          ▪

A split is a part of one row's context. For each KV head a thread block of attention_decode.cu reads it. So rows are cut
into splits of about the same size: one long row is read by the whole GPU, and short rows stay whole. A plan depends on
the lengths alone. A graph's step has as many splits as its graph; those that are left over are unused, and their thread
blocks return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import split_parts

Int32s = NDArray[np.int32]
Floats = NDArray[np.float64]

SPLIT_POSITIONS = 64
"""The positions that a thread block reads in one round; a split has a multiple of it, but for a row's last one."""
DECODE_HEADS = 8
"""Query heads of a thread block of attention_decode.cu."""
UNUSED = -1
"""The row of an unused split."""
_SPLITS_LIMIT = 64
"""The most splits of a row."""
_CUTS = np.arange(1, _SPLITS_LIMIT + 1)
_BLOCKS_OF_PROCESSOR = 3
"""Thread blocks of attention_decode.cu that a multiprocessor holds at once."""
_BLOCK_COST, _MERGE_COST, _MERGE_COST_OF_SPLIT = 3.0, 4.0, 0.125
"""Costs of a thread block's start and end, of a merge, and of each split in a merge. The unit is the time of
SPLIT_POSITIONS positions; measured on an H200."""
_GRAPH_WAVES, _GRAPH_SPLITS = 3, 4
"""A graph has splits for this many waves of thread blocks, and at least this many for each row. Rows of one length then
get as many as they need up to some 4,096 positions; unused ones are thread blocks that only return."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The splits of a step's rows, as the kernels read them."""

    singles: Int32s
    """Row, first split and number of splits of each row, in the order given (rows, 3)."""
    splits: Int32s
    """Row, number within the row, and number of the row's splits, of each split (splits, 3); the largest are first,
    because thread blocks begin in this order. A row's splits are next to one another. Unused ones are last."""


NO_SPLITS = SplitPlan(np.empty((0, 3), np.int32), np.empty((0, 3), np.int32))
"""The plan of a step without such rows."""


@dataclass(frozen=True, slots=True)
class SplitPlanner:
    """Plans the splits of one model's steps on one GPU."""

    blocks_at_once: int
    """The thread blocks that the GPU holds at once."""
    blocks_of_split: int
    """The thread blocks that read one split: for each KV head one or more."""
    most: int
    """The most splits of a step."""
    window: int = 0
    """The most positions that any layer attends to. 0 means no limit."""

    @staticmethod
    def of(config: ModelConfig, processors: int, running: int) -> SplitPlanner:
        """Return the planner of a model on a GPU of `processors` multiprocessors, for steps of `running` sequences."""
        return SplitPlanner(
            blocks_at_once=_BLOCKS_OF_PROCESSOR * processors,
            blocks_of_split=config.kv_heads * -(-config.heads // config.kv_heads // DECODE_HEADS),
            most=split_parts(running),
            window=max(config.windows) if config.windows and all(config.windows) else 0,
        )

    def of_graph(self, rows: int) -> int:
        """Return the splits of a graph of `rows` rows, used or not."""
        assert 0 < rows <= self.most, f"a graph of {rows} rows"
        wave = self.blocks_at_once // self.blocks_of_split
        return min(_SPLITS_LIMIT * rows, self.most, max(_GRAPH_WAVES * wave, _GRAPH_SPLITS * rows))

    def pieces(self, lengths: Sequence[int]) -> Int32s:
        """Return each row's pieces: how many times SPLIT_POSITIONS it reads at most. Padding has none.

        A plan depends on these numbers alone, which seldom change from one step to the next.
        """
        positions = np.array(lengths, np.int32)
        if self.window:
            positions = np.minimum(positions, self.window)
        return -(-positions // SPLIT_POSITIONS)

    def plan(self, rows: Sequence[int], pieces: Int32s, places: int = 0) -> SplitPlan:
        """Plan for rows of these numbers, which read these `pieces`.

        The plan has `places` splits, used or not; without, as many as are used. Every used split reads something, but
        for that of a row of padding.
        """
        counts = self._counts(pieces, places or self.most)
        return _arranged(np.array(rows, np.int32), pieces, counts, places)

    def _counts(self, pieces: Int32s, most: int) -> Int32s:
        """Return the number of splits of each row with these `pieces`; all together are at most `most`."""
        assert len(pieces) <= most, f"{len(pieces)} rows in {most} splits"
        read = np.sort(pieces[pieces > 0])
        most -= len(pieces) - len(read)
        longest = int(read[-1]) if len(read) else 1
        # Each size of a split cuts the longest row otherwise; those with which the rows cannot fit are left out.
        sizes = -(-longest // _CUTS[:longest])
        sizes = sizes[sizes * most >= read.sum()]
        if sizes[-1] == longest:
            return np.ones(len(pieces), np.int32)
        whole, long = np.split(read, [read.searchsorted(sizes[-1], "right")])
        cut = -(-long // sizes[:, None])
        costs = self._costs(whole, cut, -(-long // cut))
        costs[cut.sum(1) + len(whole) > most] = np.inf
        counts: Int32s = -(-np.maximum(pieces, 1) // sizes[costs.argmin()])
        return counts

    def _costs(self, whole: Int32s, cut: Int32s, even: Int32s) -> Floats:
        """Estimate the time of each way to cut long rows into `cut` splits of `even` pieces (ways, long rows).

        The `whole` rows, in ascending order, are one split each. Thread blocks run in waves, the largest first. A last
        wave that is nearly empty takes as long as a full one of the smallest splits.
        """
        of_long, read_by_long = cut.sum(1), (cut * even).sum(1)
        splits = of_long + len(whole)
        waves = splits * self.blocks_of_split / self.blocks_at_once
        started = np.ceil(waves)
        of_last = (splits - (started - 1) * self.blocks_at_once / self.blocks_of_split).astype(np.int32)
        in_last = np.append(whole, 0)[np.minimum(of_last, len(whole))]
        in_last = np.where(of_last < len(whole), in_last, read_by_long / of_long)
        busy = waves * ((read_by_long + whole.sum()) / splits + _BLOCK_COST)
        ends = np.maximum(busy + (started - waves) * (in_last + _BLOCK_COST), even.max(1) + _BLOCK_COST)
        of_row = cut.max(1)
        costs: Floats = ends + np.where(of_row > 1, _MERGE_COST + _MERGE_COST_OF_SPLIT * of_row, 0.0)
        return costs


def _arranged(rows: Int32s, pieces: Int32s, counts: Int32s, places: int) -> SplitPlan:
    """List the splits of rows with these `pieces`, `counts` of each row, the rows with the largest splits first."""
    used = int(counts.sum())
    order = np.argsort(-(pieces / counts), kind="stable")
    ordered = counts[order]
    singles = np.empty((len(rows), 3), np.int32)
    singles[:, 0], singles[:, 2] = rows, counts
    singles[order, 1] = ordered.cumsum() - ordered
    splits = np.empty((places or used, 3), np.int32)
    splits[:used] = singles[order].repeat(ordered, 0)
    splits[:used, 1] = np.arange(used) - splits[:used, 1]
    splits[used:] = UNUSED
    return SplitPlan(singles, splits)
