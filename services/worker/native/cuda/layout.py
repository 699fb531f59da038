"""Lays out the rows of a step for the kernels, as one array of 32-bit integers.

    tokens | positions | places | table_starts | drawing | tiles (2 each) | singles (3 each) | splits (3 each) | tables

Tables are those of all works, end to end. `splits.py` makes singles and splits: the rows that attend by themselves, and
how their contexts are cut. All other rows are in a tile.

A decode step of n rows has n of each of the first five, no tile, n singles, and as many splits as a graph of n rows. So
n alone decides where each section begins, as a CUDA graph of n rows needs it. First come the works' last tokens, then
the other tokens of works that have several. Rows up to n may be padding: position -1, place -1, token 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.contracts.runner import Work
from services.worker.native.cuda.splits import NO_SPLITS, SplitPlan, SplitPlanner

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The length of each section, in entries."""

    rows: int
    drawing: int
    tiles: int
    singles: int
    splits: int
    """The splits of the singles, used or not."""


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step's integers and the lengths of their sections."""

    ints: Int32s
    counts: StepCounts


class StepLayout:
    """Lays out steps. It keeps the tables of the last step's sequences and its plan of splits until the next step.

    Comparing a list of slots with the kept one takes a tenth of the time of converting it, which took 0.8 ms in a step
    of 128 sequences.
    """

    def __init__(self, block_size: int, tile_rows: int, planner: SplitPlanner) -> None:
        """Lay out for blocks of `block_size` tokens and prefill tiles of at most `tile_rows` rows."""
        self._block_size = block_size
        self._tile_rows = tile_rows
        self._planner = planner
        self._planned: tuple[object, SplitPlan] | None = None
        """What the last plan was made for, and the plan."""
        self._tables: dict[int, tuple[list[int], Int32s]] = {}
        """Each sequence's slots, and the same as an array."""

    def lay_out(self, works: Sequence[Work], *, padded_rows: int = 0) -> CudaStep:
        """Lay out a step. With `padded_rows` every work draws, each token has a row of its own, and padding fills up
        the rows."""
        assert works, "a step has work"
        if padded_rows:
            return self._lay_out_singles(works, padded_rows)
        size = self._block_size
        # Arrays, because a prompt of 8,192 tokens takes 3 ms as lists.
        tokens, positions, places, table_starts = (array("i") for _ in range(4))
        drawing: list[int] = []
        tiles: list[tuple[int, int]] = []
        singles: list[int] = []
        lengths: list[int] = []
        tables, table_start = self._of_sequences(works), 0
        for work, table in zip(works, tables, strict=True):
            start, end, first = work.start, work.end, len(tokens)
            count = end - start
            if count == 1:
                tokens.append(work.history[start])
                positions.append(start)
                places.append(work.blocks[start // size] * size + start % size)
                table_starts.append(table_start)
                singles.append(first)
                lengths.append(end)
            else:
                at = np.arange(start, end, dtype=np.int32)
                tokens.frombytes(np.asarray(work.tokens, np.int32).tobytes())
                positions.frombytes(at.tobytes())
                places.frombytes((table[at // size] * size + at % size).tobytes())
                table_starts.frombytes(np.full(count, table_start, np.int32).tobytes())
                tiles += (
                    (first + done, min(self._tile_rows, count - done)) for done in range(0, count, self._tile_rows)
                )
            if work.draws:
                drawing.append(first + count - 1)
            table_start += len(table)
        # Sorted, so that the tiles with the most positions to attend to are last: the kernel begins with them.
        tiles.sort(key=lambda tile: positions[tile[0]])
        flat = tokens + positions + places + table_starts
        flat.extend(drawing)
        flat.extend([0] * (len(flat) % 2))  # the kernel reads a pair as 8 bytes
        for tile in tiles:
            flat.extend(tile)
        plan = self._plan(singles, lengths, 0) if singles else NO_SPLITS
        counts = StepCounts(len(tokens), len(drawing), len(tiles), len(singles), len(plan.splits))
        ints = np.frombuffer(flat, np.int32)
        return CudaStep(np.concatenate([ints, plan.singles.ravel(), plan.splits.ravel(), *tables]), counts)

    def lay_out_padding(self, rows: int) -> CudaStep:
        """Lay out a step of a graph of `rows` rows, all of them padding."""
        return self._lay_out_singles([], rows)

    def _lay_out_singles(self, works: Sequence[Work], rows: int) -> CudaStep:
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        starts: list[int] = []
        others: list[tuple[Work, range, int]] = []
        tables, table_start = self._of_sequences(works), 0
        for work, table in zip(works, tables, strict=True):
            assert work.draws, "only works that draw are padded"
            last = work.end - 1
            tokens.append(work.history[last])
            positions.append(last)
            places.append(work.blocks[last // size] * size + last % size)
            starts.append(table_start)
            if work.start < last:
                others.append((work, range(work.start, last), table_start))
            table_start += len(table)
        for work, before, at in others:
            tokens += work.history[before.start : before.stop]
            positions += before
            places += [work.blocks[position // size] * size + position % size for position in before]
            starts += [at] * len(before)
        padding = rows - len(tokens)
        assert padding >= 0, "a step of a graph fits its rows"
        positions += [-1] * padding
        none, nowhere, all_rows = [0] * padding, [-1] * padding, range(rows)
        flat = [*tokens, *none, *positions, *places, *nowhere, *starts, *none, *all_rows]
        flat += [0] * (rows % 2)
        plan = self._plan(all_rows, [position + 1 for position in positions], self._planner.of_graph(rows))
        counts = StepCounts(rows, rows, 0, rows, len(plan.splits))
        return CudaStep(np.concatenate([_array(flat), plan.singles.ravel(), plan.splits.ravel(), *tables]), counts)

    def _plan(self, rows: Sequence[int], lengths: Sequence[int], places: int) -> SplitPlan:
        pieces = self._planner.pieces(lengths)
        key = (rows, pieces.tobytes(), places)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._planner.plan(rows, pieces, places)
        return self._planned[1]

    def _of_sequences(self, works: Sequence[Work]) -> list[Int32s]:
        """Return each work's slots up to its last position; the scheduler may already have added more."""
        before, self._tables = self._tables, {}
        tables: list[Int32s] = []
        for work in works:
            blocks = -(-work.end // self._block_size)
            slots = list(work.blocks[:blocks])
            assert len(slots) == blocks, f"sequence {work.sequence}: {len(slots)} slots for {work.end} positions"
            kept = before.get(work.sequence)
            if kept is None or kept[0] != slots:
                kept = slots, _array(slots)
            self._tables[work.sequence] = kept
            tables.append(kept[1])
        return tables


def _array(numbers: list[int]) -> Int32s:
    """Convert a list in half of the time that NumPy takes."""
    return np.frombuffer(array("i", numbers), np.int32)


def most_ints(rows: int, works: int, blocks: int, tile_rows: int, splits: int) -> int:
    """Return the most integers of a step of `rows` rows, `works` works, `blocks` blocks for each work, and `splits`."""
    tiles = min(rows // 2, rows // tile_rows + works)
    return 4 * rows + works + 1 + 2 * tiles + 3 * works + 3 * splits + works * blocks


@dataclass(frozen=True, slots=True)
class Sections:
    """The index at which each section begins, in integers."""

    tokens: int
    positions: int
    places: int
    table_starts: int
    drawing: int
    tiles: int
    singles: int
    splits: int
    tables: int


def sections(counts: StepCounts) -> Sections:
    """Return where `StepLayout` places the sections."""
    rows, tiles = counts.rows, 4 * counts.rows + counts.drawing
    tiles += tiles % 2
    singles = tiles + 2 * counts.tiles
    splits = singles + 3 * counts.singles
    return Sections(
        tokens=0,
        positions=rows,
        places=2 * rows,
        table_starts=3 * rows,
        drawing=4 * rows,
        tiles=tiles,
        singles=singles,
        splits=splits,
        tables=splits + 3 * counts.splits,
    )
