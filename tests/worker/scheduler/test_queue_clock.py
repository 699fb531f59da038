"""QueueClock: for what the sequences of a queue wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.scheduler.queue_clock import CAUSES, NO_WAIT, QueueClock, describe_wait


def test_each_cause_has_a_clock_that_runs_while_the_cause_does() -> None:
    clock = QueueClock()
    clock.set("blocks", 1.0)
    clock.set("places", 3.0)
    before = clock.read(4.0)
    assert before == (2.0, 1.0, 0.0)
    clock.set("tokens", 6.0)
    clock.set(None, 6.5)
    assert clock.read(9.0) == (2.0, 3.0, 0.5)
    assert clock.since(before, 9.0) == (0.0, 2.0, 0.5)


def test_a_clock_that_goes_back_counts_nothing_twice() -> None:
    clock = QueueClock()
    clock.set("blocks", 5.0)
    assert clock.read(4.0) == NO_WAIT
    assert clock.read(6.0) == (1.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from([None, *CAUSES]), st.floats(0.0, 10.0))))
def test_the_clocks_never_show_more_than_the_time_that_has_passed(spells: list[tuple[None, float]]) -> None:
    clock, now_s = QueueClock(), 0.0
    for cause, seconds in spells:
        clock.set(cause, now_s)
        now_s += seconds
    assert sum(clock.read(now_s)) == pytest.approx(sum(seconds for cause, seconds in spells if cause))


def test_a_wait_is_described_by_its_parts() -> None:
    assert describe_wait(0.0, NO_WAIT) == "0 ms"
    parts = "1.25 s for free blocks, 200 ms for its share of the steps' tokens"
    assert describe_wait(1.5, (1.25, 0.0001, 0.2)) == f"1.50 s ({parts})"
