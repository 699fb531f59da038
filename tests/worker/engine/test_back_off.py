"""services/worker/engine/back_off.py"""

from __future__ import annotations

from services.worker.engine.back_off import BACK_OFF_FIRST_S, BACK_OFF_MOST_S, STABLE_AFTER_S, BackOff


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    back_off = BackOff()
    waits = [back_off.after(0.0) for _ in range(8)]
    assert waits == [min(BACK_OFF_FIRST_S * 2**number, BACK_OFF_MOST_S) for number in range(8)]
    assert waits[-1] == BACK_OFF_MOST_S


def test_an_engine_that_lived_long_begins_again_with_the_shortest_wait() -> None:
    back_off = BackOff()
    for _ in range(8):
        back_off.after(0.0)
    assert [back_off.after(STABLE_AFTER_S), back_off.after(0.0)] == [BACK_OFF_FIRST_S, 2 * BACK_OFF_FIRST_S]
