"""Where each row of a step stands, as the kernels read it: one array of 32-bit integers, copied to the device
at once.

    tokens | positions | places | table_starts | singles | drawing | tiles (pairs) | tables of all works, end to end

A decode step of n rows has n of each of the first six and no tile, so that all but the tables lie at places that n
alone decides: what a CUDA graph of n rows wants. Rows up to n may be padding: position -1, place -1, token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.engine import Work

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Counts:
    """How long each section is."""

    rows: int
    singles: int
    drawing: int
    tiles: int
    longest: int
    """Positions that the longest single attends to; 0 without singles."""


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A step's integers and how to cut them."""

    ints: Int32s
    counts: Counts


def lay_out(works: Sequence[Work], block_size: int, tile_rows: int, *, padded_rows: int = 0) -> CudaStep:
    """`tile_rows`: most rows of a prefill tile. With `padded_rows` every work computes one token and draws, and rows up
    to that number are padding."""
    assert works, "a step has work"
    lengths = [work.end - work.start for work in works]
    firsts = [0, *np.cumsum(lengths).tolist()]
    rows = max(firsts[-1], padded_rows)
    tokens, positions, places, table_starts = (np.zeros(rows, np.int32) for _ in range(4))
    positions[:], places[:] = -1, -1
    tables: list[Int32s] = []
    table_start = 0
    for work, first, count in zip(works, firsts, lengths, strict=False):
        blocks = -(-work.end // block_size)
        assert len(work.blocks) >= blocks, (
            f"sequence {work.sequence}: {len(work.blocks)} slots for {work.end} positions"
        )
        table = np.asarray(work.blocks[:blocks], np.int32)
        own = slice(first, first + count)
        tokens[own] = work.tokens
        positions[own] = at = np.arange(work.start, work.end, dtype=np.int32)
        places[own] = table[at // block_size] * block_size + at % block_size
        table_starts[own] = table_start
        tables.append(table)
        table_start += blocks
    if padded_rows:
        assert len(works) == firsts[-1], "only single tokens are padded"
        singles = drawing = np.arange(rows, dtype=np.int32)
    else:
        singles = np.asarray([first for first, count in zip(firsts, lengths, strict=False) if count == 1], np.int32)
        drawing = np.asarray([firsts[n + 1] - 1 for n, work in enumerate(works) if work.draws], np.int32)
    tiles = [
        (first + done, min(tile_rows, count - done))
        for first, count in zip(firsts, lengths, strict=False)
        if count > 1
        for done in range(0, count, tile_rows)
    ]
    # Sorted, so that the tiles with the most to attend to are last: they are begun first.
    tiles.sort(key=lambda tile: int(positions[tile[0]]))
    longest = max((work.end for work, count in zip(works, lengths, strict=True) if count == 1), default=0)
    flat_tiles = np.asarray(tiles, np.int32).reshape(-1)
    sections = [tokens, positions, places, table_starts, singles, drawing]
    if (sum(map(len, sections))) % 2:  # pairs are read as 8 bytes
        sections.append(np.zeros(1, np.int32))
    counts = Counts(rows, len(singles), len(drawing), len(tiles), longest)
    return CudaStep(np.concatenate([*sections, flat_tiles, *tables]), counts)


def most_ints(rows: int, works: int, blocks: int, tile_rows: int) -> int:
    """Of a step of `rows` rows, `works` works and `blocks` blocks a work, at most."""
    tiles = min(rows // 2, rows // tile_rows + works)
    return 4 * rows + 2 * works + 1 + 2 * tiles + works * blocks


@dataclass(frozen=True, slots=True)
class Sections:
    """Where each section begins, in integers."""

    tokens: int
    positions: int
    places: int
    table_starts: int
    singles: int
    drawing: int
    tiles: int
    tables: int


def sections(counts: Counts) -> Sections:
    """As `lay_out` placed them."""
    rows, singles = 4 * counts.rows, 4 * counts.rows + counts.singles
    tiles = singles + counts.drawing
    tiles += tiles % 2
    return Sections(
        tokens=0,
        positions=counts.rows,
        places=2 * counts.rows,
        table_starts=3 * counts.rows,
        singles=rows,
        drawing=singles,
        tiles=tiles,
        tables=tiles + 2 * counts.tiles,
    )
