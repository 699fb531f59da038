"""Plans of splits: what the kernels read of them, and their estimated times against equal splits for all rows."""

from __future__ import annotations

import heapq
import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.native.cuda.splits import SPLIT_POSITIONS, UNUSED, SplitPlan, SplitPlanner
from tests.worker.native.cuda.planners import llama_8b

BLOCK_COST = 3.0
LIMIT = 64
TILE = 16
PLANNERS = st.builds(
    SplitPlanner,
    blocks_at_once=st.integers(3, 600),
    blocks_of_split=st.integers(1, 40),
    most=st.integers(512, 1100),
    window=st.sampled_from([0, 1, 3, 64, 200, 4096]),
)
LENGTHS = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 9000), st.just(131072)), min_size=1, max_size=60)


def plan(planner: SplitPlanner, lengths: list[int], places: int = 0) -> SplitPlan:
    return planner.plan(range(len(lengths)), planner.pieces(lengths), places)


def merge_cost(splits: int) -> float:
    return 4.0 + 0.125 * splits if splits > 1 else 0.0


def ranges(length: int, splits: int, window: int) -> list[tuple[int, int]]:
    """Return the positions that each split reads, as `cut` in attention_decode.cu says; others return at once."""
    unseen = max(0, length - window) if window else 0
    base = unseen // TILE * TILE
    rounds = -(-(length - base) // SPLIT_POSITIONS)
    each = max(1, -(-rounds // splits))
    return [
        (base + n * each * SPLIT_POSITIONS, min(base + (n + 1) * each * SPLIT_POSITIONS, length))
        for n in range(max(1, -(-rounds // each)))
    ]


@given(PLANNERS, LENGTHS, st.booleans(), st.sampled_from([0, 1, 3, 64, 200, 4096]))
def test_every_position_of_every_row_is_read_once(
    planner: SplitPlanner, lengths: list[int], captured: bool, window: int
) -> None:
    places = planner.of_graph(len(lengths)) if captured else 0
    made = plan(planner, lengths, places)
    used = made.splits[made.splits[:, 0] != UNUSED]
    assert (made.splits[len(used) :] == UNUSED).all(), "unused ones are last"
    assert len(used) <= len(made.splits) == (places or len(used)) <= planner.most
    assert made.singles[:, 0].tolist() == list(range(len(lengths)))
    assert made.singles[:, 2].sum() == len(used)
    for row, first, count in made.singles.tolist():
        assert 1 <= count <= LIMIT
        assert used[first : first + count].tolist() == [[row, number, count] for number in range(count)]
        for seen in (planner.window, window):  # that of the plan, and that of any layer
            read = ranges(lengths[row], count, seen)
            assert len(read) <= count
            assert read[0][0] <= (max(0, lengths[row] - seen) if seen else 0)
            assert read[-1][1] == lengths[row]
            assert all(end == begin for (_, end), (begin, _) in pairwise(read))
            assert all(begin < end for begin, end in read) or lengths[row] == 0
        if not planner.window:
            assert len(ranges(lengths[row], count, 0)) == count, "no split is planned for nothing"


@given(PLANNERS, LENGTHS)
def test_the_largest_splits_begin_first_and_the_same_step_has_the_same_plan(
    planner: SplitPlanner, lengths: list[int]
) -> None:
    made, again = plan(planner, lengths), plan(planner, lengths)
    assert made.singles.tolist() == again.singles.tolist()
    assert made.splits.tolist() == again.splits.tolist()
    sizes = [int(planner.pieces(lengths)[row]) / count for row, _, count in made.splits.tolist()]
    assert sizes == sorted(sizes, reverse=True)


@given(PLANNERS, LENGTHS, st.integers(0, 20))
def test_padding_has_a_split_without_positions_and_changes_nothing_for_others(
    planner: SplitPlanner, lengths: list[int], padding: int
) -> None:
    places = planner.of_graph(len(lengths) + padding)
    made = plan(planner, [*lengths, *[0] * padding], places)
    alone = plan(planner, lengths, places - padding)
    assert made.singles[: len(lengths)].tolist() == alone.singles.tolist()
    assert (made.singles[len(lengths) :, 2] == 1).all()


def test_long_rows_leave_places_for_padding() -> None:
    made = plan(llama_8b(), [8192, *[0] * 5], 8)
    assert made.singles[:, 2].tolist() == [3, 1, 1, 1, 1, 1]


def test_rows_keep_their_numbers() -> None:
    planner = llama_8b()
    made = planner.plan([7, 3], planner.pieces([40, 128 * 64]))
    assert made.singles[0].tolist() == [7, len(made.splits) - 1, 1]
    assert made.singles[1].tolist() == [3, 0, len(made.splits) - 1]
    assert set(made.splits[:, 0].tolist()) == {3, 7}


def test_a_window_of_all_layers_bounds_what_is_cut() -> None:
    assert plan(llama_8b(window=64), [8192, 8192]).singles[:, 2].tolist() == [1, 1]


def equal_cost(planner: SplitPlanner, rows: int, pieces: int, splits: int) -> float:
    """Return the estimated time of rows of one length, each with as many splits, whose blocks run in waves."""
    waves = -(-rows * splits * planner.blocks_of_split // planner.blocks_at_once)
    return waves * (-(-pieces // splits) + BLOCK_COST) + merge_cost(splits)


def best_equal(planner: SplitPlanner, rows: int, pieces: int) -> int:
    most = max(1, min(pieces, LIMIT, planner.most // rows))
    return min(range(1, most + 1), key=lambda splits: equal_cost(planner, rows, pieces, splits))


GRAPHS = [1, 2, 3, 4, *range(8, 257, 8)]
PIECES = [1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 16, 32])
def test_rows_of_one_length_get_no_slower_plan_than_the_best_number_for_all(kv_heads: int) -> None:
    planner = SplitPlanner(3 * 132, kv_heads, 1024)
    for rows, pieces in product(GRAPHS, PIECES):
        lengths = [SPLIT_POSITIONS * pieces] * rows
        best = equal_cost(planner, rows, pieces, best_equal(planner, rows, pieces))
        counts = plan(planner, lengths).singles[:, 2].tolist()
        assert equal_cost(planner, rows, pieces, counts[0]) <= best, (rows, pieces)
        assert len(set(counts)) == 1
        # A graph has fewer splits, but enough for what is best at 4096 positions, whatever the length is.
        fixed = equal_cost(planner, rows, pieces, best_equal(planner, rows, 64))
        counts = plan(planner, lengths, planner.of_graph(rows)).singles[:, 2].tolist()
        assert equal_cost(planner, rows, pieces, counts[0]) <= fixed, (rows, pieces)


def simulated(planner: SplitPlanner, lengths: list[int], counts: list[int]) -> float:
    """Return the time until all thread blocks have run, each at the place that is free first, in the grid's order."""
    busy = [0.0] * planner.blocks_at_once
    pieces = [math.ceil(length / SPLIT_POSITIONS) for length in lengths]
    sizes = [math.ceil(of_row / count) for of_row, count in zip(pieces, counts, strict=True) for _ in range(count)]
    sizes.sort(reverse=True)
    for size in sizes:
        for _ in range(planner.blocks_of_split):
            heapq.heapreplace(busy, busy[0] + size + BLOCK_COST)
    return max(busy) + merge_cost(max(counts))


@pytest.mark.parametrize(
    ("lengths", "at_most"),
    [
        ([300] * 8 + [8192], 0.4),
        ([512] * 15 + [8192], 0.4),
        ([1024] * 31 + [32768], 0.25),
        ([512] * 255 + [65536], 0.2),
    ],
)
def test_one_long_row_does_not_decide_how_long_a_step_takes(lengths: list[int], at_most: float) -> None:
    planner = llama_8b()
    rows = next(rows for rows in GRAPHS if rows >= len(lengths))
    counts = plan(planner, lengths, planner.of_graph(rows)).singles[:, 2].tolist()
    fixed = best_equal(planner, rows, 64)
    took = simulated(planner, lengths, counts)
    assert took <= at_most * simulated(planner, lengths, [fixed] * len(lengths))
    # What no plan can beat: all places are busy until the end, with whole rows.
    work = sum(-(-length // SPLIT_POSITIONS) + BLOCK_COST for length in lengths) * planner.blocks_of_split
    assert took <= 2 * (work / planner.blocks_at_once) + merge_cost(max(counts))


@pytest.mark.parametrize("rows", [2, 5, 9, 16, 33, 50, 100, 250])
def test_lengths_at_random_are_planned_about_as_well_as_the_best_number_for_all(rows: int) -> None:
    planner, random = llama_8b(), np.random.default_rng(5)
    for longest in (200, 2000, 8192, 32768):
        lengths = random.integers(1, longest, rows).tolist()
        pieces = [-(-length // SPLIT_POSITIONS) for length in lengths]
        counts = plan(planner, lengths, planner.of_graph(rows)).singles[:, 2].tolist()
        equal = [[min(each, of_row) for of_row in pieces] for each in range(1, min(LIMIT, planner.most // rows) + 1)]
        best = min(simulated(planner, lengths, each) for each in equal)
        assert simulated(planner, lengths, counts) <= 1.1 * best, longest


def test_a_graph_has_places_for_every_row_and_no_more_than_there_is_memory_for() -> None:
    for kv_heads, rows in product((1, 8, 500), range(1, 300)):
        planner = SplitPlanner(396, kv_heads, 1200)
        assert rows <= planner.of_graph(rows) <= min(planner.most, LIMIT * rows)
    with pytest.raises(AssertionError, match="a graph of 1300 rows"):
        llama_8b().of_graph(1300)
    with pytest.raises(AssertionError, match="3 rows in 2 splits"):
        plan(llama_8b(), [1, 1, 1], 2)
