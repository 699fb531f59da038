"""The index arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.contracts.runner import Work
from services.worker.native.step import lay_out
from tests.worker.native.works import work

BLOCK_SIZE = 4


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    """Draw works with slots of their own and histories of any length."""
    works: list[Work] = []
    free = iter(draw(st.permutations(range(200))))
    for sequence in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 60))
        computed = draw(st.integers(1, length) | st.just(1))
        spare = draw(st.integers(0, 2))
        slots = [next(free) for _ in range(-(-length // BLOCK_SIZE) + spare)]
        tokens = [sequence * 100 + position for position in range(length)]
        works.append(work(tokens, slots, start=length - computed, draws=draw(st.booleans()), sequence=sequence))
    return works


@given(steps(), st.integers(4, 200))
def test_every_row_has_its_tokens_position_and_slot(works: list[Work], limit: int) -> None:
    step = lay_out(works, BLOCK_SIZE, limit)
    rows = [(w, w.start + place) for w in works for place in range(len(w.tokens))]
    assert step.tokens.tolist() == [w.history[position] for w, position in rows]
    assert step.positions.tolist() == [position for _, position in rows]
    assert step.slots.tolist() == [w.blocks[position // BLOCK_SIZE] for w, position in rows]
    assert step.offsets.tolist() == [position % BLOCK_SIZE for _, position in rows]
    last = np.cumsum([len(w.tokens) for w in works]) - 1
    assert step.drawing_rows.tolist() == [row for row, w in zip(last, works, strict=True) if w.draws]


@given(steps(), st.integers(4, 200))
def test_every_work_attends_once_and_reads_only_its_own_slots(works: list[Work], limit: int) -> None:
    step = lay_out(works, BLOCK_SIZE, limit)
    owner = [w for w in works for _ in w.tokens]
    attending = [span.first for span in step.spans] + [int(row) for group in step.groups for row in group.rows]
    assert sorted(attending) == np.cumsum([0, *(len(w.tokens) for w in works[:-1])]).tolist()
    for span in step.spans:
        assert _own(owner[span.first], span.table[0].tolist(), span.start + span.count)
    for group in step.groups:
        for row, table, length in zip(group.rows, group.table, group.lengths, strict=True):
            assert length == owner[row].start + 1
            assert _own(owner[row], table.tolist(), int(length))


def _own(w: Work, table: Sequence[int], length: int) -> bool:
    blocks = -(-length // BLOCK_SIZE)
    return list(table[:blocks]) == list(w.blocks[:blocks]) and set(table[blocks:]) <= {w.blocks[0]}


@given(steps(), st.integers(4, 200))
def test_groups_stay_within_their_bounds(works: list[Work], limit: int) -> None:
    for group in lay_out(works, BLOCK_SIZE, limit).groups:
        blocks = -(-group.lengths // BLOCK_SIZE)
        assert blocks.max() <= 2 * blocks.min()
        assert len(group.rows) == 1 or group.table.size * BLOCK_SIZE <= limit


def test_too_few_slots_for_the_tokens_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="1 slots for 5 positions"):
        lay_out([work([1, 2, 3, 4, 5], [0])], BLOCK_SIZE, 100)
