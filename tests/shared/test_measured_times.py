"""Seconds on a grid: what is between the points, and what is no grid."""

from __future__ import annotations

import pytest

from shared.measured_times import MeasuredTimes, Point

POINTS: list[Point] = [(1, 0, 1.0), (3, 0, 3.0), (1, 10, 2.0), (3, 10, 4.0)]


def test_times_above_the_grid_go_on_with_its_last_slope_and_below_it_the_edge_holds() -> None:
    times = MeasuredTimes(POINTS, "times")
    assert times.least == 1
    assert [times.at(*place) for place in ((2, 5), (5, 0), (0, 0), (1, 20), (3, 10))] == [2.5, 5.0, 1.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "no times"),
        ([*POINTS, (1, 0, 5.0)], "two times for the same values"),
        (POINTS[:3], "no time for 3, 10"),
        ([(1, 0, 0.0)], "out of range"),
        ([(1, 0, float("inf"))], "out of range"),
    ],
)
def test_what_is_no_grid_of_times_is_refused_by_name(points: list[Point], said: str) -> None:
    with pytest.raises(ValueError, match=f"^decode: .*{said}"):
        MeasuredTimes(points, "decode")
