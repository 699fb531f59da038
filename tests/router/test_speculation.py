"""Blocks that are expected: found until confirmed or expired."""

from __future__ import annotations

from services.router.index import Index
from services.router.speculation import Speculation
from shared.messages import Overlap

A = ("a", 0)


def test_expected_blocks_are_found_until_they_expire() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open(A)
    entries = Speculation(index, ttl_s=5, limit_blocks=100)
    entries.add(slot, [1, 2], 0.0)
    assert index.find([1, 2]) == {A: Overlap(2)}
    entries.expire(4.9, blocks=100)
    assert index.find([1, 2]) == {A: Overlap(2)}
    entries.expire(5.0, blocks=100)
    assert index.bytes == 0
    entries.validate()


def test_confirmed_blocks_stay_when_the_expectation_expires() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open(A)
    entries = Speculation(index, ttl_s=5, limit_blocks=100)
    entries.add(slot, [1, 2, 3], 0.0)
    index.stored(slot, 0, [1, 2])
    entries.expire(5.0, blocks=100)
    assert index.find([1, 2, 3]) == {A: Overlap(2)}
    index.removed(slot, 0, [1, 2])
    assert index.bytes == 0


def test_at_the_limit_the_oldest_expectation_goes_early_and_one_over_the_limit_is_not_made() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open(A)
    entries = Speculation(index, ttl_s=5, limit_blocks=4)
    entries.add(slot, [1, 2, 3], 0.0)
    entries.add(slot, [4, 5], 1.0)
    entries.add(slot, range(10, 20), 2.0)
    entries.validate()
    assert index.find([1]) == {}
    assert index.find([4]) == {A: Overlap(1)}
    assert index.find([10]) == {}


def test_expiring_stops_after_a_slice() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open(A)
    entries = Speculation(index, ttl_s=5, limit_blocks=100)
    for number in range(4):
        entries.add(slot, [2 * number, 2 * number + 1], 0.0)
    assert entries.expire(9.0, blocks=3)
    assert entries.blocks == 4
    assert not entries.expire(9.0, blocks=100)


def test_what_is_expected_of_a_slot_that_was_given_up_is_hidden_and_then_gone() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open(A)
    entries = Speculation(index, ttl_s=5, limit_blocks=100)
    entries.add(slot, [1], 0.0)
    index.retire(slot)
    assert index.find([1]) == {}
    entries.expire(9.0, blocks=100)
    assert slot.state == "freed"
