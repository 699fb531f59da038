"""The integers of a step, cut as the kernels cut them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.native.cuda.layout import CudaStep, StepCounts, StepLayout, most_ints, sections
from tests.worker.native.works import work


def cut(step: CudaStep) -> dict[str, list[int]]:
    at, counts = sections(step.counts), step.counts
    ends = {"singles": at.singles + counts.singles, "drawing": at.drawing + counts.drawing, "tables": len(step.ints)}
    starts = [("tokens", at.tokens), ("positions", at.positions), ("places", at.places)]
    starts += [("table_starts", at.table_starts), ("singles", at.singles), ("drawing", at.drawing)]
    starts += [("tiles", at.tiles), ("tables", at.tables)]
    following = [start for _, start in starts[1:]] + [len(step.ints)]
    return {
        name: step.ints[start : ends.get(name, end)].tolist()
        for (name, start), end in zip(starts, following, strict=True)
    }


def test_chunks_become_tiles_and_single_tokens_stand_apart() -> None:
    chunk = work([*range(100, 106)], [9, 4], start=1, draws=False)
    step = StepLayout(4, 2).lay_out([chunk, work([7, 8, 9], [3], start=2)])
    assert step.counts == StepCounts(rows=6, singles=1, drawing=1, tiles=3, longest=3)
    assert cut(step) == {
        "tokens": [101, 102, 103, 104, 105, 9],
        "positions": [1, 2, 3, 4, 5, 2],
        "places": [37, 38, 39, 16, 17, 14],
        "table_starts": [0, 0, 0, 0, 0, 2],
        "singles": [5],
        "drawing": [5],
        "tiles": [0, 2, 2, 2, 4, 1],
        "tables": [9, 4, 3],
    }


def test_tiles_with_the_most_to_attend_to_are_last() -> None:
    step = StepLayout(4, 4).lay_out([work([*range(8)], [0, 1], start=4), work([*range(3)], [2])])
    assert cut(step)["tiles"] == [4, 3, 0, 4]


def test_tiles_begin_at_an_even_index() -> None:
    for works in ([work([1, 2], [0])], [work([1, 2], [0], draws=False)], [work([1, 2], [0]), work([1], [1])]):
        assert sections(StepLayout(4, 4).lay_out(works).counts).tiles % 2 == 0


def test_padding_leaves_no_trace_and_every_section_lies_where_the_rows_decide() -> None:
    step = StepLayout(4, 4).lay_out([work([5, 6], [3], start=1)], padded_rows=4)
    assert cut(step) == {
        "tokens": [6, 0, 0, 0],
        "positions": [1, -1, -1, -1],
        "places": [13, -1, -1, -1],
        "table_starts": [0, 0, 0, 0],
        "singles": [0, 1, 2, 3],
        "drawing": [0, 1, 2, 3],
        "tiles": [],
        "tables": [3],
    }
    full = StepLayout(4, 4).lay_out([work([5, 6], [3], start=1)] * 4, padded_rows=4)
    assert sections(full.counts) == sections(step.counts)


def test_each_token_of_a_tail_has_a_row_and_the_last_tokens_come_first() -> None:
    works = [work([*range(100, 107)], [9, 4], start=3), work([7, 8, 9], [3], start=2), work([50, 51], [6])]
    step = StepLayout(4, 4).lay_out(works, padded_rows=8)
    assert step.counts == StepCounts(rows=8, singles=8, drawing=8, tiles=0, longest=7)
    assert cut(step) == {
        "tokens": [106, 9, 51, 103, 104, 105, 50, 0],
        "positions": [6, 2, 1, 3, 4, 5, 0, -1],
        "places": [18, 14, 25, 39, 16, 17, 24, -1],
        "table_starts": [0, 2, 3, 0, 0, 0, 3, 0],
        "singles": [*range(8)],
        "drawing": [*range(8)],
        "tiles": [],
        "tables": [9, 4, 3, 6],
    }


@given(st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=4), min_size=1, max_size=6))
def test_a_layout_gives_the_same_result_after_other_steps_as_a_new_one(steps: list[list[list[int]]]) -> None:
    layout = StepLayout(4, 4)
    for tables in [tables for tables in steps if tables]:
        works = [work([*range(4 * len(own))], own, start=4 * len(own) - 1, sequence=n) for n, own in enumerate(tables)]
        laid, expected = layout.lay_out(works), StepLayout(4, 4).lay_out(works)
        assert laid.counts == expected.counts
        assert laid.ints.tolist() == expected.ints.tolist()


def test_a_table_that_changed_in_place_is_laid_out_again() -> None:
    layout, blocks = StepLayout(4, 4), [7, 8]
    one = work([*range(6)], blocks, start=5)
    assert cut(layout.lay_out([one]))["tables"] == [7, 8]
    blocks[1] = 3
    assert cut(layout.lay_out([one]))["tables"] == [7, 3]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=6))
def test_no_step_has_more_integers_than_are_reserved_for_it(chunks: list[tuple[int, int, bool]]) -> None:
    works = [
        work([*range(end)], [*range(-(-end // 4))], start=max(0, end - length), draws=draws)
        for length, end, draws in chunks
    ]
    rows = sum(one.end - one.start for one in works)
    step = StepLayout(4, 8).lay_out(works)
    assert len(step.ints) <= most_ints(rows, len(works), 8, 8)
