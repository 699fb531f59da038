from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.tiers.hit_window import STEPS, HitWindow, LookupCounts


def test_nothing_asked_has_no_rate() -> None:
    assert HitWindow(60.0).total(0.0).rate(0) is None


def test_lookups_leave_after_the_window() -> None:
    window = HitWindow(60.0)
    window.add(LookupCounts(1, 10, host=4, disk=2), 0.5)
    window.add(LookupCounts(1, 10, host=10), 30.0)
    assert window.total(59.9) == LookupCounts(2, 20, host=14, disk=2)
    assert window.total(60.0) == LookupCounts(1, 10, host=10)
    assert window.total(1000.0) == LookupCounts()
    window.validate()


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_the_total_is_that_of_the_window_to_within_a_step(lookups: list[tuple[float, int, int]]) -> None:
    window, now_s = HitWindow(30.0), 0.0
    told: list[tuple[float, LookupCounts]] = []
    for passed_s, host, disk in lookups:
        now_s += passed_s
        found = LookupCounts(1, 20, host, disk)
        window.add(found, now_s)
        told.append((now_s, found))
        window.validate()
        surely = sum((one for at_s, one in told if at_s > now_s - 30.0 + 30.0 / STEPS), LookupCounts())
        perhaps = sum((one for at_s, one in told if at_s > now_s - 30.0 - 30.0 / STEPS), LookupCounts())
        assert surely.host <= window.total(now_s).host <= perhaps.host
        assert surely.lookups <= window.total(now_s).lookups <= perhaps.lookups
