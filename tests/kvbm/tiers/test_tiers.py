from __future__ import annotations

import pytest

from services.kvbm.tiers.actions import TierSizes
from services.kvbm.tiers.disk_records import FoundBlock
from services.kvbm.tiers.policies import LruPolicy
from services.kvbm.tiers.tiers import Tiers
from shared.blocks import Content, ContentEvicted, ContentStored
from shared.hashing import ContentKey, event_hash
from tests.kvbm.chains import chain, keys


def tiers(
    slots: int = 4,
    records: int = 4,
    *,
    on: bool = True,
    disk_sightings: int = 2,
    fill_disk: bool = False,
) -> Tiers:
    sizes = TierSizes(
        slots=slots,
        records=records,
        disk_sightings=disk_sightings,
        fill_disk=fill_disk,
        held_share=1,
    )
    made = Tiers(sizes, LruPolicy(10), LruPolicy(10))
    if on:
        made.disk_ready([])
    return made


def keep(store: Tiers, contents: list[Content]) -> list[Content]:
    """Offer and publish the blocks. Return the evicted ones."""
    offered = store.offer(contents, len(contents))
    store.publish(offered.slots)
    store.validate([])
    return [event.content for _, event in offered.events if isinstance(event, ContentEvicted)]


def spill(store: Tiers) -> list[Content]:
    """Spill everything that is worth it to disk."""
    spills, _ = store.take_spills(100)
    for one in spills:
        store.spill_done(one, "ok")
    store.validate([])
    return [one.content for one in spills]


def test_a_store_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        tiers(slots=0)


def test_a_block_goes_to_disk_when_it_was_seen_twice() -> None:
    store, contents = tiers(), chain(1, 2)
    keep(store, contents)
    assert spill(store) == []
    store.release(store.fetch(keys(contents)).slots)
    assert spill(store) == contents, "parents first"
    assert spill(store) == []


def test_while_records_are_free_everything_goes_to_disk() -> None:
    store, contents = tiers(records=3, fill_disk=True), chain(1, 2)
    keep(store, contents)
    assert spill(store) == contents
    keep(store, chain(5, 6))
    assert spill(store) == chain(5), "6 was seen once, and would have taken another's record"
    assert store.statistics().spills_waiting == 0
    store.release(store.fetch(keys(chain(5, 6))).slots)
    assert spill(store) == chain(5, 6)[1:]


def test_the_hosts_policy_hears_what_is_on_disk_too() -> None:
    class Listening(LruPolicy):
        def __init__(self) -> None:
            super().__init__(10)
            self.below: set[ContentKey] = set()

        def backed(self, key: ContentKey, below: bool) -> None:
            assert key in self
            (self.below.add if below else self.below.discard)(key)

        def gone(self, key: ContentKey) -> None:
            super().gone(key)
            self.below.discard(key)

    policy, contents = Listening(), chain(1, 2)
    store = Tiers(TierSizes(slots=3, records=2, disk_sightings=1, held_share=1), policy, LruPolicy(2))
    store.disk_ready([])
    keep(store, contents)
    assert policy.below == set()
    spill(store)
    assert policy.below == set(keys(contents))
    keep(store, chain(3))
    spill(store)
    assert policy.below == set(keys([contents[1], *chain(3)])), "1 has left the disk for 3"
    store.disk_failed()
    assert policy.below == set()
    store.disk_ready([FoundBlock(1, contents[0])])
    assert policy.below == set(keys(contents)[:1])


def test_a_block_that_comes_back_after_it_was_evicted_was_seen_twice() -> None:
    store, contents = tiers(slots=1), chain(1)
    keep(store, contents)
    assert keep(store, chain(2)) == contents
    keep(store, contents)
    assert spill(store) == contents


def test_a_block_that_another_worker_has_too_was_seen_twice() -> None:
    store, contents = tiers(), chain(1)
    keep(store, contents)
    keep(store, contents)
    assert spill(store) == contents


def test_a_block_stays_while_it_is_written_to_disk() -> None:
    store, contents = tiers(slots=1, disk_sightings=1), chain(1)
    keep(store, contents)
    (one,), events = store.take_spills(5)
    assert events == []
    assert store.offer(chain(2), 1).declined == 1
    assert store.spill_done(one, "ok") == [("disk", ContentStored(contents[0]))]
    assert store.offer(chain(2), 1).events == [("host", ContentEvicted(contents[0]))]


def test_a_spill_that_failed_publishes_nothing_and_is_tried_again_when_the_block_is_seen_again() -> None:
    store, contents = tiers(disk_sightings=1), chain(1)
    keep(store, contents)
    (one,), _ = store.take_spills(5)
    assert store.spill_done(one, "failed") == []
    assert store.take_spills(5) == ([], [])
    keep(store, contents)
    assert spill(store) == contents


def test_a_block_that_has_left_the_host_tier_is_not_spilled() -> None:
    store = tiers(slots=1, disk_sightings=1)
    keep(store, chain(1))
    keep(store, chain(2))
    assert spill(store) == chain(2)


def test_a_full_disk_makes_room_but_not_of_what_is_read() -> None:
    store = tiers(slots=2, records=1, disk_sightings=1)
    (first,), (second,) = chain(1), chain(2)
    keep(store, [first])
    spill(store)
    keep(store, chain(8, 9))
    found = store.fetch([first.key])
    (read,) = found.reads
    assert store.take_spills(5) == ([], []), "the only record is being read"
    assert store.read_done(read, "ok") == [("host", ContentStored(first))]
    store.release(found.slots)
    keep(store, [second])
    spills, events = store.take_spills(5)
    assert len(spills) == 1
    assert events == [("disk", ContentEvicted(first))]


def test_no_more_is_spilled_at_once_than_asked_for() -> None:
    store = tiers(disk_sightings=1)
    keep(store, chain(1, 2, 3))
    assert len(store.take_spills(2)[0]) == 2
    assert store.statistics().spills_waiting == 1


def test_a_disk_without_space_for_more_exchanges_what_it_has() -> None:
    store, contents = tiers(slots=8, records=3, disk_sightings=1), chain(1, 2, 3)
    keep(store, contents[:1])
    spill(store)
    keep(store, contents[1:2])
    (refused,), _ = store.take_spills(5)
    assert store.spill_done(refused, "no space") == []
    store.validate([])
    assert (store.statistics().disk.withheld, store.statistics().disk.free) == (2, 0)
    keep(store, contents[2:])
    (instead,), events = store.take_spills(5)
    assert events == [("disk", ContentEvicted(contents[0]))]
    store.spill_done(instead, "ok")
    store.retry_space()
    store.validate([])
    keep(store, contents[:2])
    assert spill(store) == contents[:2]


def test_a_disk_that_has_no_space_even_for_that_loses_one_block_and_is_left_alone() -> None:
    store, contents = tiers(slots=8, records=4, disk_sightings=1), chain(1, 2, 3, 4, 5)
    keep(store, contents[:2])
    spill(store)
    keep(store, contents[2:])
    for _ in range(2):
        (one,), _ = store.take_spills(1)
        store.spill_done(one, "no space")
        store.validate([])
    assert store.take_spills(5) == ([], [])
    assert len(store.snapshot("disk")) == 1
    store.retry_space()
    assert spill(store) == contents[4:]


def test_when_the_disk_goes_its_blocks_cannot_be_found() -> None:
    store, contents = tiers(disk_sightings=1), chain(1, 2)
    keep(store, contents)
    spill(store)
    assert store.disk_failed() == [("disk", ContentEvicted(content)) for content in contents]
    assert store.disk_failed() == []
    store.validate([])
    keep(store, chain(5, 6, 7, 8))
    assert store.take_spills(5) == ([], [])
    assert store.fetch(keys(contents)).slots == []


def test_when_the_disk_comes_back_its_blocks_are_found_and_the_host_tiers_go_to_it() -> None:
    store, found, there = tiers(on=False, disk_sightings=1), chain(1, 2), chain(5)
    keep(store, there)
    events = store.disk_ready([FoundBlock(3, found[0]), FoundBlock(0, found[1])])
    store.validate([])
    assert events == [("disk", ContentStored(content)) for content in found]
    (one,), _ = store.take_spills(5)
    assert one.content == there[0]
    assert one.record not in (0, 3)
    assert [read.record for read in store.fetch(keys(found)).reads] == [3, 0]


def test_of_two_records_with_one_key_the_newer_counts_and_the_other_is_free() -> None:
    store, (content,) = tiers(on=False, records=2), chain(1)
    assert store.disk_ready([FoundBlock(0, content), FoundBlock(1, content)]) == [("disk", ContentStored(content))]
    assert store.statistics().disk.free == 1
    assert store.fetch([content.key]).reads[0].record == 1


def test_what_was_found_on_disk_goes_children_first() -> None:
    store, found = tiers(on=False, records=2, disk_sightings=1), chain(1, 2)
    store.disk_ready([FoundBlock(0, found[0]), FoundBlock(1, found[1])])
    keep(store, chain(7))
    assert store.take_spills(1)[1] == [("disk", ContentEvicted(found[1]))]


def test_a_write_from_before_the_disk_went_publishes_nothing_and_its_record_waits_for_it() -> None:
    store, contents = tiers(records=1, disk_sightings=1), chain(1)
    keep(store, contents)
    (old,), _ = store.take_spills(5)
    store.disk_failed()
    assert store.disk_ready([FoundBlock(0, contents[0])]) == [], "the write may still land there"
    assert store.take_spills(5) == ([], [])
    assert store.spill_done(old, "ok") == []
    store.validate([])
    assert spill(store) == contents


def test_a_read_from_before_the_disk_went_still_brings_its_block() -> None:
    store, contents = tiers(slots=1, records=1, disk_sightings=1), chain(1)
    keep(store, contents)
    spill(store)
    keep(store, chain(2))
    found = store.fetch(keys(contents))
    store.disk_failed()
    store.disk_ready([])
    store.validate(found.slots)
    assert store.read_done(found.reads[0], "ok") == [("host", ContentStored(contents[0]))]
    store.validate(found.slots)
    assert store.statistics().disk.free == 1


def test_a_disk_that_hangs_takes_no_more_slots_than_may_be_held() -> None:
    store = Tiers(TierSizes(slots=8, records=16), LruPolicy(8), LruPolicy(16))
    on_disk = [chain(token)[0] for token in range(16)]
    store.disk_ready([FoundBlock(record, content) for record, content in enumerate(on_disk)])
    in_memory = chain(100, 101)
    keep(store, in_memory)
    for first in (0, 4, 8):
        held = store.fetch(keys(on_disk[first : first + 4]))
        assert len(held.reads) == (4 if not first else 0), "half of the slots"
        store.release(held.slots)  # nobody waits any longer; the reads go on
        store.validate([])
    again = store.fetch(keys([*on_disk[:2], *on_disk[8:10]]))
    assert len(again.slots) == 2, "what is being read can be waited for by others"
    store.release(again.slots)
    read = store.fetch(keys(in_memory))
    assert (len(read.slots), read.loading) == (2, [])
    store.validate(read.slots)


def test_a_record_that_is_read_while_the_disk_is_exchanged_is_not_found_and_free_afterwards() -> None:
    store, contents, other = tiers(slots=1, records=1, disk_sightings=1), chain(1), chain(5)
    keep(store, contents)
    spill(store)
    keep(store, chain(2))
    found = store.fetch(keys(contents))
    store.disk_failed()
    assert store.disk_ready([FoundBlock(0, other[0])]) == []
    store.release(found.slots)
    assert store.read_done(found.reads[0], "lost") == []
    store.validate([])
    assert store.statistics().disk.free == 1


def test_a_prefix_goes_from_its_end() -> None:
    store, contents = tiers(slots=3), chain(1, 2, 3)
    keep(store, contents)
    assert keep(store, chain(7, 8, 9)) == list(reversed(contents))


class Listening(LruPolicy):
    """Remembers the uses that it heard of."""

    def __init__(self) -> None:
        super().__init__(10)
        self.heard: list[ContentKey] = []

    def used(self, key: ContentKey) -> None:
        self.heard.append(key)
        super().used(key)


def test_a_policy_hears_of_uses_after_the_answer_and_before_it_is_asked_for_a_victim() -> None:
    policy, contents = Listening(), chain(1, 2)
    store = Tiers(TierSizes(slots=2, held_share=1), policy, LruPolicy(1))
    keep(store, contents)
    store.release(store.fetch(keys(contents)).slots)
    assert policy.heard == []
    store.prepare()
    assert policy.heard == [contents[1].key, contents[0].key]
    store.release(store.fetch(keys(contents[:1])).slots)
    keep(store, chain(9))
    assert policy.heard[2:] == [contents[0].key]


def test_slots_are_freed_ahead_of_need() -> None:
    store, contents = tiers(slots=16), chain(*range(16))
    keep(store, contents)
    assert store.prepare() == [("host", ContentEvicted(content)) for content in (contents[15], contents[14])]
    store.validate([])
    assert store.prepare() == []
    assert keep(store, chain(100, 101)) == []


def test_nothing_that_is_held_goes_ahead_of_need() -> None:
    store, contents = tiers(slots=16), chain(*range(16))
    keep(store, contents)
    held = store.fetch(keys(contents))
    assert store.prepare() == []
    store.validate(held.slots)


def test_uses_are_reported_to_the_policy_before_they_are_many() -> None:
    policy, contents = Listening(), chain(1)
    store = Tiers(TierSizes(slots=2, held_share=1), policy, LruPolicy(1))
    keep(store, contents)
    for _ in range(5000):
        store.release(store.fetch(keys(contents)).slots)
    store.validate([])
    assert len(policy.heard) > 4000


def test_digest_and_snapshot_are_those_of_what_can_be_found() -> None:
    store, contents = tiers(disk_sightings=1), chain(1, 2, 3)
    keep(store, list(reversed(contents)))
    assert store.snapshot("host") == contents
    assert store.snapshot("disk") == []
    spill(store)
    assert store.snapshot("disk") == contents
    digest = 0
    for content in contents:
        digest ^= event_hash(content.key)
    assert store.digest("host") == store.digest("disk") == digest
    store.disk_failed()
    assert store.digest("disk") == 0


def test_a_store_without_a_disk_tier_never_spills() -> None:
    store = tiers(records=0, on=False, disk_sightings=1)
    keep(store, chain(1))
    assert store.take_spills(5) == ([], [])
    assert store.statistics().disk.on is False
