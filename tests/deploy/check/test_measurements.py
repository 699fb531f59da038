"""deploy/local/check/measurements.py: bounds of another clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.check.measurements import ClockBounds, ClockSample, Measurements, clock_bounds
from tests.deploy.check.measured import WELL


def both(bounds: ClockBounds | None) -> tuple[float, float]:
    assert bounds is not None
    return bounds.least_s, bounds.most_s


def test_without_a_sample_nothing_is_known() -> None:
    assert clock_bounds([]) is None


def test_samples_narrow_each_other() -> None:
    slow = ClockSample(100.0, 101.0, 105.5)
    quick = ClockSample(200.0, 200.1, 205.1)
    assert both(clock_bounds([slow, quick])) == pytest.approx((5.0, 5.1))


def test_a_clock_of_whole_seconds_is_known_from_where_a_second_begins() -> None:
    ahead = 3.25
    samples = [ClockSample(at, at + 0.001, int(at + ahead), 1.0) for at in (each / 20 for each in range(22))]
    bounds = clock_bounds(samples)
    assert bounds is not None
    assert bounds.least_s <= ahead <= bounds.most_s
    assert bounds.most_s - bounds.least_s < 0.06


def test_a_clock_that_was_set_meanwhile_has_wide_bounds() -> None:
    bounds = clock_bounds([ClockSample(0.0, 0.1, 5.0), ClockSample(1.0, 1.1, 61.0)])
    assert both(bounds) == pytest.approx((4.9, 60.0))


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 10), st.floats(0, 1), st.sampled_from([0.0, 1e-3, 1.0]))),
)
def test_the_true_offset_is_within_the_bounds(offset: float, asked: list[tuple[float, float, float, float]]) -> None:
    samples = []
    for at, took, share, step in asked:
        theirs = at + took * share + offset
        samples.append(ClockSample(at, at + took, theirs // step * step if step else theirs, step))
    bounds = clock_bounds(samples)
    if bounds is None:
        assert not samples
        return
    assert bounds.least_s - 1e-6 <= offset <= bounds.most_s + 1e-6


def test_all_of_it_goes_through_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(WELL), type=Measurements) == WELL
