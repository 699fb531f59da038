from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.transfer.path_choice import MANY_BLOCKS, MOST_IN_A_ROW, Fallbacks, path_order

PATHS = ("rows", "staged")


@pytest.mark.parametrize(
    ("blocks", "fragments", "order"),
    [
        (1, 1, ("rows", "batch")),
        (MANY_BLOCKS - 1, 1, ("rows", "batch")),
        (MANY_BLOCKS, 1, ("batch", "rows")),
        (MANY_BLOCKS - 1, 2, ("rows", "staged", "batch")),
        (MANY_BLOCKS, 2, ("staged", "rows", "batch")),
        (MANY_BLOCKS - 1, 3, ("direct", "rows", "batch")),
        (MANY_BLOCKS, 3, ("direct", "rows", "batch")),
    ],
)
def test_the_number_of_blocks_and_their_fragments_order_the_paths(
    blocks: int, fragments: int, order: tuple[str, ...]
) -> None:
    offered = {1: ("rows", "batch"), 2: ("rows", "batch", "staged"), 3: ("rows", "batch", "direct")}[fragments]
    assert path_order(blocks, offered, fragments=fragments) == order
    for path in order:
        others = tuple(other for other in order if other != path)
        assert path_order(blocks, offered, fragments=fragments, forced=path) == (path, *others)
        assert path_order(blocks, others, fragments=fragments) == others


def test_a_path_that_fails_several_times_in_a_row_is_left_out() -> None:
    fallbacks = Fallbacks()
    for turn in range(MOST_IN_A_ROW):
        assert fallbacks.usable(PATHS) == ["rows", "staged"]
        assert fallbacks.record_failure("rows") == (turn == MOST_IN_A_ROW - 1)
    assert fallbacks.usable(PATHS) == ["staged"]
    fallbacks.validate()


def test_a_success_resets_the_count_of_failures() -> None:
    fallbacks = Fallbacks()
    for _ in range(3 * MOST_IN_A_ROW):
        assert not fallbacks.record_failure("rows")
        fallbacks.record_success("rows")
    assert fallbacks.usable(PATHS) == ["rows", "staged"]


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fallbacks = Fallbacks()
        self.in_a_row: dict[str, int] = dict.fromkeys(PATHS, 0)

    @rule(path=st.sampled_from(PATHS))
    def fail(self, path: str) -> None:
        if self.fallbacks.usable([path]):
            self.in_a_row[path] += 1
            assert self.fallbacks.record_failure(path) == (self.in_a_row[path] == MOST_IN_A_ROW)

    @rule(path=st.sampled_from(PATHS))
    def work(self, path: str) -> None:
        if self.fallbacks.usable([path]):
            self.fallbacks.record_success(path)
            self.in_a_row[path] = 0

    @invariant()
    def holds(self) -> None:
        self.fallbacks.validate()
        assert self.fallbacks.usable(PATHS) == [path for path in PATHS if self.in_a_row[path] < MOST_IN_A_ROW]


TestAnyOrder = AnyOrder.TestCase
