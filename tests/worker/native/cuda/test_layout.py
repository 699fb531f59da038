"""The integers of a step, cut as the kernels cut them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.native.cuda.capacity import split_parts
from services.worker.native.cuda.layout import CudaStep, StepCounts, StepLayout, most_ints, sections
from services.worker.native.cuda.splits import SplitPlanner
from tests.worker.native.cuda.planners import llama_8b
from tests.worker.native.works import work

FEW = SplitPlanner(blocks_at_once=16, blocks_of_split=2, most=512)
"""A planner that gives graphs of 4 and 8 rows 24 and 32 splits."""
UNUSED = [-1, -1, -1]


def layout(tile_rows: int = 4) -> StepLayout:
    return StepLayout(4, tile_rows, FEW)


def cut(step: CudaStep) -> dict[str, list[int]]:
    at, counts = sections(step.counts), step.counts
    ends = {"drawing": at.drawing + counts.drawing, "tables": len(step.ints)}
    starts = [("tokens", at.tokens), ("positions", at.positions), ("places", at.places)]
    starts += [("table_starts", at.table_starts), ("drawing", at.drawing), ("tiles", at.tiles)]
    starts += [("singles", at.singles), ("splits", at.splits), ("tables", at.tables)]
    following = [start for _, start in starts[1:]] + [len(step.ints)]
    return {
        name: step.ints[start : ends.get(name, end)].tolist()
        for (name, start), end in zip(starts, following, strict=True)
    }


def test_chunks_become_tiles_and_single_tokens_stand_apart() -> None:
    chunk = work([*range(100, 106)], [9, 4], start=1, draws=False)
    step = layout(2).lay_out([chunk, work([7, 8, 9], [3], start=2)])
    assert step.counts == StepCounts(rows=6, drawing=1, tiles=3, singles=1, splits=1)
    assert cut(step) == {
        "tokens": [101, 102, 103, 104, 105, 9],
        "positions": [1, 2, 3, 4, 5, 2],
        "places": [37, 38, 39, 16, 17, 14],
        "table_starts": [0, 0, 0, 0, 0, 2],
        "drawing": [5],
        "tiles": [0, 2, 2, 2, 4, 1],
        "singles": [5, 0, 1],
        "splits": [5, 0, 1],
        "tables": [9, 4, 3],
    }


def test_tiles_with_the_most_to_attend_to_are_last() -> None:
    step = layout().lay_out([work([*range(8)], [0, 1], start=4), work([*range(3)], [2])])
    assert cut(step)["tiles"] == [4, 3, 0, 4]


def test_tiles_begin_at_an_even_index() -> None:
    for works in ([work([1, 2], [0])], [work([1, 2], [0], draws=False)], [work([1, 2], [0]), work([1], [1])]):
        assert sections(layout().lay_out(works).counts).tiles % 2 == 0


def test_padding_leaves_no_trace_and_every_section_lies_where_the_rows_decide() -> None:
    step = layout().lay_out([work([5, 6], [3], start=1)], padded_rows=4)
    assert cut(step) == {
        "tokens": [6, 0, 0, 0],
        "positions": [1, -1, -1, -1],
        "places": [13, -1, -1, -1],
        "table_starts": [0, 0, 0, 0],
        "drawing": [0, 1, 2, 3],
        "tiles": [],
        "singles": [*[0, 0, 1], *[1, 1, 1], *[2, 2, 1], *[3, 3, 1]],
        "splits": [*[0, 0, 1], *[1, 0, 1], *[2, 0, 1], *[3, 0, 1], *20 * UNUSED],
        "tables": [3],
    }
    full = layout().lay_out([work([5, 6], [3], start=1)] * 4, padded_rows=4)
    assert sections(full.counts) == sections(step.counts)


def test_each_token_of_a_tail_has_a_row_and_the_last_tokens_come_first() -> None:
    works = [work([*range(100, 107)], [9, 4], start=3), work([7, 8, 9], [3], start=2), work([50, 51], [6])]
    step = layout().lay_out(works, padded_rows=8)
    assert step.counts == StepCounts(rows=8, drawing=8, tiles=0, singles=8, splits=32)
    assert cut(step) == {
        "tokens": [106, 9, 51, 103, 104, 105, 50, 0],
        "positions": [6, 2, 1, 3, 4, 5, 0, -1],
        "places": [18, 14, 25, 39, 16, 17, 24, -1],
        "table_starts": [0, 2, 3, 0, 0, 0, 3, 0],
        "drawing": [*range(8)],
        "tiles": [],
        "singles": [number for row in range(8) for number in (row, row, 1)],
        "splits": [*(number for row in range(8) for number in (row, 0, 1)), *24 * UNUSED],
        "tables": [9, 4, 3, 6],
    }


def test_a_long_row_has_many_splits_and_what_they_leave_is_unused() -> None:
    works = [work([7] * 60, [*range(15)], start=59), work([7] * 640, [*range(160)], start=639)]
    laid = layout().lay_out(works, padded_rows=3)
    sections_of = cut(laid)
    counts = sections_of["singles"][2::3]
    assert counts[1] > counts[0] == counts[2] == 1
    assert sections_of["splits"] == [
        *(number for split in range(counts[1]) for number in (1, split, counts[1])),
        *[0, 0, 1],
        *[2, 0, 1],  # padding
        *(laid.counts.splits - counts[1] - 2) * UNUSED,
    ]
    eager = layout().lay_out(works)
    assert eager.counts.splits == counts[0] + counts[1]
    assert cut(eager)["splits"] == sections_of["splits"][: 3 * eager.counts.splits]


def test_the_kept_plan_is_made_again_when_a_row_reads_more() -> None:
    kept = layout()
    for end in (640, 641, 640, 320, 64, 65):
        works = [work([7] * end, [*range(-(-end // 4))], start=end - 1)]
        for padded_rows in (0, 1, 2):
            laid = kept.lay_out(works, padded_rows=padded_rows)
            assert laid.ints.tolist() == layout().lay_out(works, padded_rows=padded_rows).ints.tolist()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(0, 9))
def test_a_step_of_a_graph_lies_like_padding_alone_and_has_no_more_integers_than_reserved(
    lengths: list[int], padding: int
) -> None:
    rows, planner = len(lengths) + padding, llama_8b()
    works = [work([5] * end, [*range(-(-end // 16))], start=end - 1) for end in lengths]
    step = StepLayout(16, 8, planner).lay_out(works, padded_rows=rows)
    empty = StepLayout(16, 8, planner).lay_out_padding(rows)
    assert sections(step.counts) == sections(empty.counts)
    assert len(empty.ints) == sections(empty.counts).tables
    blocks = max(len(one.blocks) for one in works)
    assert len(step.ints) <= most_ints(rows, rows, blocks, 8, split_parts(256))


@given(st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=4), min_size=1, max_size=6))
def test_a_layout_gives_the_same_result_after_other_steps_as_a_new_one(steps: list[list[list[int]]]) -> None:
    kept = layout()
    for tables in [tables for tables in steps if tables]:
        works = [work([*range(4 * len(own))], own, start=4 * len(own) - 1, sequence=n) for n, own in enumerate(tables)]
        laid, expected = kept.lay_out(works), layout().lay_out(works)
        assert laid.counts == expected.counts
        assert laid.ints.tolist() == expected.ints.tolist()


def test_a_table_that_changed_in_place_is_laid_out_again() -> None:
    kept, blocks = layout(), [7, 8]
    one = work([*range(6)], blocks, start=5)
    assert cut(kept.lay_out([one]))["tables"] == [7, 8]
    blocks[1] = 3
    assert cut(kept.lay_out([one]))["tables"] == [7, 3]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=6))
def test_no_step_has_more_integers_than_are_reserved_for_it(chunks: list[tuple[int, int, bool]]) -> None:
    works = [
        work([*range(end)], [*range(-(-end // 4))], start=max(0, end - length), draws=draws)
        for length, end, draws in chunks
    ]
    rows = sum(one.end - one.start for one in works)
    step = layout(8).lay_out(works)
    assert len(step.ints) <= most_ints(rows, len(works), 8, 8, FEW.most)
