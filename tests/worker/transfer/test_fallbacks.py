from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.worker.transfer.fallbacks import MOST_IN_A_ROW, MOST_REASONS, OTHER, Fallbacks

PATHS = ("rows", "staged")


def test_a_path_that_fails_again_and_again_is_left_out_for_good() -> None:
    fallbacks = Fallbacks()
    for _ in range(MOST_IN_A_ROW):
        assert fallbacks.usable(PATHS) == ["rows", "staged"]
        assert fallbacks.failed("rows", "cudaErrorInvalidValue", 5) == "rows: cudaErrorInvalidValue"
    assert fallbacks.usable(PATHS) == ["staged"]
    assert fallbacks.blocks == {"rows: cudaErrorInvalidValue": 5 * MOST_IN_A_ROW}
    fallbacks.validate()


def test_a_path_that_works_in_between_stays() -> None:
    fallbacks = Fallbacks()
    for _ in range(3 * MOST_IN_A_ROW):
        fallbacks.failed("rows", "once", 1)
        fallbacks.worked("rows")
    assert fallbacks.usable(PATHS) == ["rows", "staged"]


def test_reasons_beyond_the_most_count_as_one() -> None:
    fallbacks = Fallbacks()
    for number in range(MOST_REASONS):
        fallbacks.failed("rows", f"reason {number}", 1)
        fallbacks.worked("rows")
    assert fallbacks.failed("rows", "another", 2) == fallbacks.failed("staged", "yet another", 3) == OTHER
    assert fallbacks.failed("rows", "reason 1", 1) == "rows: reason 1"
    assert fallbacks.blocks[OTHER] == 5
    fallbacks.validate()


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fallbacks = Fallbacks()
        self.in_a_row: dict[str, int] = dict.fromkeys(PATHS, 0)
        self.blocks = 0

    @rule(path=st.sampled_from(PATHS), reason=st.integers(0, 40), blocks=st.integers(1, 9))
    def fail(self, path: str, reason: int, blocks: int) -> None:
        if self.fallbacks.usable([path]):
            self.fallbacks.failed(path, str(reason), blocks)
            self.in_a_row[path] += 1
            self.blocks += blocks

    @rule(path=st.sampled_from(PATHS))
    def work(self, path: str) -> None:
        if self.fallbacks.usable([path]):
            self.fallbacks.worked(path)
            self.in_a_row[path] = 0

    @invariant()
    def holds(self) -> None:
        self.fallbacks.validate()
        assert self.fallbacks.usable(PATHS) == [path for path in PATHS if self.in_a_row[path] < MOST_IN_A_ROW]
        assert sum(self.fallbacks.blocks.values()) == self.blocks


TestAnyOrder = AnyOrder.TestCase
