from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.path_choice import PathChoice, PathTiming

PATHS = ("rows", "batch", "staged", "zero_copy")
SIZES = (1, 8, 64)
seconds = st.floats(1e-6, 1.0)


def rows(blocks: int, **took_s: float) -> list[PathTiming]:
    return [PathTiming(path, loads, blocks, s) for path, s in took_s.items() for loads in (False, True)]


def test_the_fastest_copy_is_taken_for_groups_of_about_its_size() -> None:
    choice = PathChoice.cheapest([*rows(1, rows=1.0, staged=2.0), *rows(8, rows=9.0, staged=4.0)])
    first = [choice.order(blocks, loads=True)[0] for blocks in (1, 7, 8, 1000)]
    assert first == ["rows", "rows", "staged", "staged"]


def test_a_paths_delay_of_a_step_counts_like_its_own_time() -> None:
    def taken(kernel_s: float) -> str:
        measured = [
            row
            for loads in (False, True)
            for row in (
                PathTiming("rows", loads, 1, 1.0, 0.1),
                PathTiming("zero_copy", loads, 1, kernel_s, kernel_s * 0.6),
            )
        ]
        return PathChoice.cheapest(measured).order(1, loads=False)[0]

    assert taken(0.7) == "rows"
    assert taken(0.6) == "zero_copy"


def test_each_direction_has_its_own_order_and_smaller_groups_use_the_smallest_measured_size() -> None:
    measured = [
        PathTiming("rows", True, 4, 1.0),
        PathTiming("batch", True, 4, 2.0),
        PathTiming("rows", False, 4, 2.0),
        PathTiming("batch", False, 4, 1.0),
    ]
    choice = PathChoice.cheapest(measured)
    assert choice.order(1, loads=True) == ("rows", "batch")
    assert choice.order(1, loads=False) == ("batch", "rows")


def test_a_path_that_is_forced_goes_first_and_the_others_after_it() -> None:
    choice = PathChoice.forced("batch", ["rows", "batch", "staged"])
    assert choice.order(1, loads=True) == choice.order(500, loads=False) == ("batch", "rows", "staged")
    assert choice.table() == []


def test_the_table_has_a_line_a_direction_and_size_best_first() -> None:
    choice = PathChoice.cheapest([*rows(1, rows=2e-6, staged=1e-6), PathTiming("rows", True, 8, 3e-6, 5e-7)])
    assert choice.table() == [
        "save 1: staged 1.0 + 0.0, rows 2.0 + 0.0",
        "load 1: staged 1.0 + 0.0, rows 2.0 + 0.0",
        "load 8: rows 3.0 + 0.5",
    ]


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(PATHS), st.booleans(), st.sampled_from(SIZES)), st.tuples(seconds, seconds)
    ),
    seconds,
    st.integers(1, 100),
    st.booleans(),
)
def test_the_order_has_each_path_measured_for_that_size_once_and_costs_ascend(
    drawn: dict[tuple[str, bool, int], tuple[float, float]], base_s: float, blocks: int, loads: bool
) -> None:
    base = {("rows", way, 1): (base_s, 0.0) for way in (False, True)}
    measured = [PathTiming(*key, *times) for key, times in (drawn | base).items()]
    order = PathChoice.cheapest(measured).order(blocks, loads=loads)
    size = max(row.blocks for row in measured if row.loads == loads and row.blocks <= blocks)
    costs_s = {row.path: row.cost_s for row in measured if (row.loads, row.blocks) == (loads, size)}
    assert sorted(order) == sorted(costs_s)
    assert [costs_s[path] for path in order] == sorted(costs_s.values())
