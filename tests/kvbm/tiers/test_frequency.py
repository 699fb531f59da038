from __future__ import annotations

from services.kvbm.tiers.frequency import ENOUGH, Sightings
from tests.kvbm.chains import chain, keys


def test_what_was_seen_is_counted_as_far_as_it_matters() -> None:
    sightings, (key,) = Sightings(2), keys(chain(1))
    assert sightings.of(key) == 0
    assert [sightings.see([key]) for _ in range(3)] == [[1], [2], [3]]
    assert sightings.see([key] * 100)[-1] == ENOUGH
    assert sightings.of(key) == ENOUGH


def test_what_was_seen_longest_ago_is_forgotten_first() -> None:
    sightings, (first, second, third) = Sightings(2), keys(chain(1, 2, 3))
    assert sightings.see((first, second, first, third)) == [1, 1, 2, 1]
    assert (sightings.of(first), sightings.of(second), sightings.of(third)) == (2, 0, 1)
    assert len(sightings) == 2


def test_what_is_to_be_counted_later_is_counted_before_anybody_asks() -> None:
    sightings, (first, second, third) = Sightings(2), keys(chain(1, 2, 3))
    sightings.see_later((first, second))
    assert sightings.of(first) == 1
    sightings.see_later((first,))
    assert sightings.see((third, first)) == [1, 3]
    sightings.see_later((third,))
    assert len(sightings) == 2
    assert (sightings.of(first), sightings.of(second), sightings.of(third)) == (3, 0, 2)


def test_no_more_than_so_many_wait_to_be_counted() -> None:
    sightings, many = Sightings(2), keys(chain(*range(100)))
    for _ in range(100):
        sightings.see_later(many)
        sightings.validate()
    assert [sightings.of(key) > 0 for key in many[-3:]] == [False, True, True]
