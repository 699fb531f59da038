from __future__ import annotations

from services.kvbm.tiers.frequency import COUNT_MOST, AccessFrequency
from tests.kvbm.chains import chain, keys


def test_what_was_seen_is_counted_as_far_as_it_matters() -> None:
    sightings, (key,) = AccessFrequency(2), keys(chain(1))
    assert sightings.count(key) == 0
    assert [sightings.record([key]) for _ in range(3)] == [[1], [2], [3]]
    assert sightings.record([key] * 100)[-1] == COUNT_MOST
    assert sightings.count(key) == COUNT_MOST


def test_what_was_seen_longest_ago_is_forgotten_first() -> None:
    sightings, (first, second, third) = AccessFrequency(2), keys(chain(1, 2, 3))
    assert sightings.record((first, second, first, third)) == [1, 1, 2, 1]
    assert (sightings.count(first), sightings.count(second), sightings.count(third)) == (2, 0, 1)
    assert len(sightings) == 2


def test_what_is_to_be_counted_later_is_counted_before_anybody_asks() -> None:
    sightings, (first, second, third) = AccessFrequency(2), keys(chain(1, 2, 3))
    sightings.record_later((first, second))
    assert sightings.count(first) == 1
    sightings.record_later((first,))
    assert sightings.record((third, first)) == [1, 3]
    sightings.record_later((third,))
    assert len(sightings) == 2
    assert (sightings.count(first), sightings.count(second), sightings.count(third)) == (3, 0, 2)


def test_a_limited_number_of_sightings_wait_to_be_counted() -> None:
    sightings, many = AccessFrequency(2), keys(chain(*range(100)))
    for _ in range(100):
        sightings.record_later(many)
        sightings.validate()
    assert [sightings.count(key) > 0 for key in many[-3:]] == [False, True, True]
