"""Which points a sweep measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.size.grid import Place, TimeGrid

Timing = Callable[[int, int], float]


def grid(**changes: float) -> TimeGrid:
    most = int(changes.get("most", 30))
    return TimeGrid((1, 64), (64, 8192), step=(1, 64), tolerance=changes.get("tolerance", 0.08), most=most)


def swept(time_of: Timing, one: TimeGrid, *, points: int = 1000) -> list[Place]:
    """Measure until the grid is complete, or up to a number of points; return them in order."""
    measured: list[Place] = []
    while (place := one.next()) is not None and len(measured) < points:
        assert place not in one.seconds
        one.seconds[place] = time_of(*place)
        measured.append(place)
    return measured


def flat(x: int, y: int) -> float:
    return 0.004 + 1e-6 * x * y


def bent(x: int, y: int) -> float:
    return max(0.004, 0.0005 * x) + 1e-8 * x * y


def test_times_on_a_line_need_the_corners_and_one_look_at_each_axis() -> None:
    one = grid()
    corners, middles = [(1, 64), (1, 8192), (64, 64), (64, 8192)], [(8, 64), (8, 8192), (1, 704), (64, 704)]
    assert swept(flat, one) == [*corners, *middles, (8, 704)]
    assert one.places() == [(x, y) for x in (1, 8, 64) for y in (64, 704, 8192)]


def test_a_bend_gets_values_around_it_until_the_line_is_near_enough() -> None:
    one = grid()
    measured = swept(bent, one)
    xs = sorted({x for x, _ in one.places()})
    assert 8 in xs
    assert len(measured) <= 20
    assert all(place in one.seconds for place in ((x, y) for x in xs for y in (64, 8192)))


def test_a_bend_at_one_end_of_the_other_axis_alone_is_found() -> None:
    one = grid()
    swept(lambda x, y: bent(x, 0) if y == 64 else 0.1 + x, one)
    assert len({x for x, _ in one.places()}) > 3


def test_a_bend_within_the_spread_of_the_repetitions_is_not_looked_at_further() -> None:
    one = grid()
    one.spread = {(64, 64): 0.9, (64, 8192): 0.9}
    swept(bent, one)
    assert {x for x, _ in one.places()} == {1, 8, 64}


def test_the_grid_never_has_more_points_than_it_may() -> None:
    one = grid(tolerance=0.0001, most=12)
    swept(lambda x, y: (1 + x) ** 0.3 * (1 + y) ** 0.2, one)
    assert len(one.places()) <= 12


def test_a_sweep_that_was_interrupted_goes_on_with_the_same_places() -> None:
    whole, first = grid(), grid()
    all_of_it = swept(bent, whole)
    before = swept(bent, first, points=5)
    second = grid()
    second.seconds.update({place: bent(*place) for place in before})
    assert [*before, *swept(bent, second)] == all_of_it
    assert second.places() == whole.places()


def test_without_a_corner_there_is_no_grid() -> None:
    one = grid()
    swept(bent, one, points=3)
    assert (one.places(), one.filled(one.seconds)) == ([], [])


def test_of_a_grid_that_was_cut_short_all_is_used_that_was_measured_at_both_edges() -> None:
    one = grid()
    swept(flat, one, points=6)
    one.seconds[1, 704] = flat(1, 704)  # but not its other edge
    assert one.places() == [(x, y) for x in (1, 8, 64) for y in (64, 8192)]
    one = grid()
    swept(flat, one, points=8)
    assert (8, 704) not in one.seconds
    times = {(x, y): seconds for x, y, seconds in one.filled(one.seconds)}
    assert set(times) == {(x, y) for x in (1, 8, 64) for y in (64, 704, 8192)}
    assert times[8, 704] == pytest.approx(flat(8, 704))
    assert one.next() == (8, 704), "it is still to be measured"


def test_a_time_that_follows_from_the_edges_is_no_less_than_the_shortest_of_them() -> None:
    one = grid()
    swept(lambda x, y: 9.0 if (x, y) in {(1, 64), (64, 8192)} else 0.1, one, points=8)
    assert {seconds for *place, seconds in one.filled(one.seconds) if tuple(place) not in one.seconds} == {0.1}


@given(st.integers(1, 6), st.integers(0, 9), st.floats(1e-4, 1), st.floats(0, 1e-2), st.floats(0, 1e-3))
def test_any_sweep_ends_with_a_complete_grid(x: int, y: int, fixed: float, each: float, pair: float) -> None:
    one = TimeGrid((1, 2**x), (0, 64 * y), step=(1, 64), tolerance=0.05, most=20)
    swept(lambda a, b: fixed + each * a + pair * a * b**1.5, one)
    places = one.places()
    assert len(places) == len({x for x, _ in places}) * len({y for _, y in places})
    assert one.left == 0
