"""Lays out the rows of a step: index arrays made once and used by every layer.

    rows of the step    | work 0: a prefill chunk | work 1: one token | work 2: one token | …   (in order)
    Span                  attends alone             ╰── a Group attends together ──╯

Works that compute one token are grouped by the length of their history, so that padding at most doubles what a group
reads. A group ends where it would gather more than it may hold at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class StepWork(Protocol):
    """What a step's rows depend on of a Work, which also a plan for other ranks has (native/parallel)."""

    @property
    def sequence(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def draws(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One work's chunk of several tokens: rows first … first + count - 1, whose positions begin at `start`."""

    first: int
    count: int
    start: int
    table: Ints
    """The slots up to the last position, (1, blocks)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Works of one token each, which attend together."""

    rows: Ints
    lengths: Ints
    """How many positions each work attends to, its own included."""
    table: Ints
    """The slots, (works, blocks). A shorter sequence repeats its first slot, so that it reads only its own pages."""
    mask: NDArray[np.float32]
    """What is added to scores, (works, 1, 1, longest): -inf beyond a work's own length."""

    @property
    def longest(self) -> int:
        """How many positions the longest work attends to."""
        return int(self.lengths.max())


@dataclass(frozen=True, slots=True)
class Step:
    """The index arrays of a step; the first four have an entry for each row."""

    tokens: Ints
    positions: Ints
    slots: Ints
    offsets: Ints
    """The place of each row within its block."""
    spans: tuple[Span, ...]
    groups: tuple[Group, ...]
    drawing_rows: Ints
    """The last row of each work that draws, in the order of works."""


def lay_out(works: Sequence[StepWork], block_size: int, group_limit_positions: int) -> Step:
    """Make a step's index arrays. A group gathers at most `group_limit_positions` (one work always fits)."""
    assert works, "a step has work"
    counts = [work.end - work.start for work in works]
    firsts = np.cumsum([0, *counts])
    positions = np.concatenate([np.arange(work.start, work.end) for work in works])
    tables = [_table(work, block_size) for work in works]
    slots = np.concatenate(
        [
            table[np.arange(w.start, w.start + n) // block_size]
            for w, n, table in zip(works, counts, tables, strict=True)
        ]
    )
    single = [number for number, count in enumerate(counts) if count == 1]
    return Step(
        tokens=np.concatenate([np.asarray(work.tokens, np.int64) for work in works]),
        positions=positions,
        slots=slots,
        offsets=positions % block_size,
        spans=tuple(
            Span(int(firsts[number]), count, works[number].start, tables[number][None])
            for number, count in enumerate(counts)
            if count > 1
        ),
        groups=tuple(
            _group([works[number] for number in members], [tables[number] for number in members], firsts[members])
            for members in _gather(single, [len(table) for table in tables], group_limit_positions // block_size)
        ),
        drawing_rows=np.asarray([firsts[n + 1] - 1 for n, work in enumerate(works) if work.draws], np.int64),
    )


def _table(work: StepWork, block_size: int) -> Ints:
    """Return the slots up to the work's last position; the scheduler may already have added more."""
    blocks = -(-work.end // block_size)
    assert len(work.blocks) >= blocks, f"sequence {work.sequence}: {len(work.blocks)} slots for {work.end} positions"
    return np.asarray(work.blocks[:blocks], np.int64)


def _gather(single: Sequence[int], blocks: Sequence[int], limit_blocks: int) -> Iterator[list[int]]:
    """Group works (by index) of similar length: at most twice the shortest, and the padded table within the limit."""
    group: list[int] = []
    for number in sorted(single, key=lambda number: blocks[number]):
        widest = blocks[number]  # lengths ascend, so the newest decides the padding
        if group and (widest > 2 * blocks[group[0]] or widest * (len(group) + 1) > limit_blocks):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _group(works: Sequence[StepWork], tables: Sequence[Ints], rows: Ints) -> Group:
    widest = max(len(table) for table in tables)
    lengths = np.asarray([work.start + 1 for work in works], np.int64)
    beyond = np.arange(lengths.max()) >= lengths[:, None]
    return Group(
        rows=rows,
        lengths=lengths,
        table=np.stack([np.concatenate([table, np.full(widest - len(table), table[0])]) for table in tables]),
        mask=np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, None],
    )
