from __future__ import annotations

from collections.abc import Callable

import pytest

from services.kvbm.tickets import awaited
from services.kvbm.tickets.errors import BadRequest, TicketExpired, TooManyTickets, UnknownOwner, UnknownTicket
from services.kvbm.tickets.results import FetchProgress, TicketLimits
from services.kvbm.tickets.tickets import Tickets
from services.kvbm.tiers.actions import HeldPrefix, Offered, TierEvent, TierSizes
from services.kvbm.tiers.disk_records import FoundBlock
from services.kvbm.tiers.policies import LruPolicy
from services.kvbm.tiers.tiers import Tiers
from shared.blocks import Content, ContentEvicted, ContentStored
from tests.kvbm.chains import chain, keys

BOUNDS = TicketLimits(store_time_s=10, fetch_time_s=20, tickets_per_owner=3, blocks_per_request=6, owner_share=1)


class Store:
    """One layout's tickets over its tiers, with two owners and a disk; checked after every step."""

    def __init__(
        self,
        sizes: TierSizes,
        bounds: TicketLimits = BOUNDS,
        *,
        before: tuple[str, ...] = (),
        owners: tuple[str, ...] = ("a", "b"),
    ) -> None:
        self.tiers = Tiers(sizes, LruPolicy(10), LruPolicy(10), quarantined=bool(before))
        self.tickets = Tickets(self.tiers, bounds, former_owners=before)
        if sizes.records:
            self.tiers.disk_ready([])
        for owner in owners:
            self.tickets.attach(owner)

    def store(self, owner: str, contents: list[Content], now_s: float = 0) -> Offered:
        granted = self.tickets.store(owner, contents, now_s)
        self.tickets.validate()
        return granted

    def keep(self, contents: list[Content], now_s: float = 0) -> list[TierEvent]:
        """Store and commit as owner a."""
        granted = self.store("a", contents, now_s)
        events = self.tickets.commit("a", granted.ticket, granted.slots, now_s)
        self.tickets.validate()
        return [*granted.events, *events]

    def spill(self) -> None:
        """Spill everything that is worth it to disk."""
        for spill in self.tiers.take_spills(100)[0]:
            self.tiers.spill_done(spill, "ok")

    def fetch(self, contents: list[Content], now_s: float = 0, owner: str = "b") -> HeldPrefix:
        fetched = self.tickets.fetch(owner, keys(contents), now_s)
        self.tickets.validate()
        return fetched

    def on_disk_only(self, contents: list[Content]) -> None:
        """Store the blocks, spill them, and push them out of the host tier with as many others."""
        self.keep(contents)
        self.spill()
        others = chain(*range(1000, 1000 + self.tiers.sizes.slots))
        for start in range(0, len(others), 4):
            self.keep(others[start : start + 4])
        assert not {*keys(contents)} & {*keys(self.tiers.snapshot("host"))}
        assert {*keys(contents)} <= {*keys(self.tiers.snapshot("disk"))}


def plain(slots: int = 8) -> Store:
    return Store(TierSizes(slots=slots, held_share=1))


def with_disk(slots: int = 8, records: int = 50) -> Store:
    return Store(TierSizes(slots=slots, records=records, disk_sightings=1, held_share=1))


# --- discard


def test_a_discarded_block_is_found_in_no_tier_and_its_record_is_erased_before_it_is_used() -> None:
    store, contents = with_disk(), chain(1, 2, 3)
    store.keep(contents)
    store.spill()
    slots, events = store.tickets.discard("b", keys(contents[1:2]))
    store.tickets.validate()
    assert len(slots) == 1
    assert events == [("host", ContentEvicted(contents[1])), ("disk", ContentEvicted(contents[1]))]
    assert store.fetch(contents).ready == 1
    disk = store.tiers.statistics().disk
    assert (disk.free, disk.erasing) == (47, 1)
    (record,) = store.tiers.take_erases()
    store.tiers.erase_done(record)
    store.tickets.validate()
    assert store.tiers.statistics().disk.free == 48


def test_a_discarded_block_that_is_read_stays_where_it_is_until_its_ticket_ends() -> None:
    store, contents = plain(3), chain(1, 2)
    store.keep(contents)
    fetched = store.fetch(contents)
    slots, _ = store.tickets.discard("b", keys(contents))
    store.tickets.validate()
    assert {*slots} == {*fetched.slots}
    host = store.tiers.statistics().host
    assert (host.free, host.leaving, host.held) == (1, 2, 2)
    again = store.store("a", contents)
    assert not {*again.slots} & {*slots}, "nobody writes under the ticket's feet"
    store.tickets.release("b", fetched.ticket)
    store.tickets.validate()
    assert store.tiers.statistics().host.leaving == 0


def test_a_block_that_is_discarded_while_it_is_written_is_not_published() -> None:
    store, contents = plain(), chain(1, 2)
    granted = store.store("a", contents)
    assert store.tickets.discard("b", keys(contents[1:])) == ([], [])
    store.tickets.validate()
    events = store.tickets.commit("a", granted.ticket, granted.slots, 1)
    store.tickets.validate()
    assert events == [("host", ContentStored(contents[0]))]
    assert len(store.keep(contents)) == 1, "the next one that stores it is believed"


def test_a_block_that_is_discarded_while_it_is_spilled_is_erased_after_it() -> None:
    store, contents = with_disk(), chain(1)
    store.keep(contents)
    ((spill,), _) = store.tiers.take_spills(1)
    store.tickets.discard("a", keys(contents))
    store.tickets.validate()
    assert store.tiers.take_erases() == []
    assert store.tiers.spill_done(spill, "ok") == []
    store.tickets.validate()
    assert store.tiers.take_erases() == [spill.record]
    assert not store.tiers.snapshot("disk")


def test_a_block_that_is_discarded_while_it_comes_from_disk_ends_the_prefix() -> None:
    store, contents = with_disk(), chain(1, 2)
    store.on_disk_only(contents)
    fetched = store.fetch(contents)
    assert len(fetched.reads) == 2
    store.tickets.discard("a", keys(contents[1:]))
    store.tickets.validate()
    found: list[int] = []
    for read in fetched.reads:
        advanced, _ = store.tickets.read_done(read, "ok", 0)
        store.tickets.validate()
        found += [news.found for news in advanced]
    assert found == [2, 1]
    assert store.fetch(contents).slots == fetched.slots[:1]


def test_only_an_owner_may_discard_and_not_without_bound() -> None:
    store = plain()
    with pytest.raises(UnknownOwner):
        store.tickets.discard("nobody", keys(chain(1)))
    with pytest.raises(BadRequest, match="7 blocks"):
        store.tickets.discard("a", keys(chain(1, 2, 3, 4, 5, 6, 7)))


# --- store, commit, abort


def test_what_one_owner_commits_another_can_fetch() -> None:
    store, contents = plain(), chain(1, 2, 3)
    granted = store.store("a", contents)
    assert store.fetch(contents).ticket == 0
    events = store.tickets.commit("a", granted.ticket, granted.slots, 1)
    assert events == [("host", ContentStored(content)) for content in contents]
    fetched = store.fetch(contents)
    assert fetched.slots == granted.slots
    assert fetched.ready == 3


def test_two_owners_that_store_the_same_block_share_a_slot_and_both_succeed() -> None:
    store, contents = plain(), chain(1, 2)
    first = store.store("a", contents)
    second = store.store("b", contents)
    assert (second.ticket, second.slots, second.known) == (0, [], 2)
    store.tickets.commit("a", first.ticket, first.slots, 1)
    assert store.fetch(contents).ready == 2


def test_a_block_given_twice_in_one_request_gets_one_slot() -> None:
    (content,) = chain(1)
    granted = plain().store("a", [content, content])
    assert (granted.indices, granted.known) == ([0], 1)


def test_slots_that_were_not_written_are_free_after_the_commit() -> None:
    store, contents = plain(), chain(1, 2, 3)
    granted = store.store("a", contents)
    store.tickets.commit("a", granted.ticket, granted.slots[:1], 1)
    assert store.fetch(contents).ready == 1
    assert store.tiers.statistics().host.free == 7


def test_an_aborted_store_publishes_nothing_and_leaves_nothing() -> None:
    store, contents = plain(), chain(1, 2)
    granted = store.store("a", contents)
    store.tickets.abort("a", granted.ticket)
    store.tickets.abort("a", granted.ticket)
    store.tickets.validate()
    assert store.fetch(contents).ticket == 0
    assert store.tiers.statistics().host.free == 8


def test_a_full_host_tier_makes_room_and_reports_the_evicted_block() -> None:
    store = plain(slots=2)
    old, new = chain(1, 2), chain(3)
    store.keep(old)
    granted = store.store("a", new)
    assert granted.events == [("host", ContentEvicted(old[1]))]


def test_no_block_goes_for_one_that_follows_it() -> None:
    store = plain(slots=3)
    prefix = chain(1, 2)
    store.keep(prefix[:1])
    store.keep(chain(7, 8))
    granted = store.store("a", prefix)
    assert [event for _, event in granted.events] == [ContentEvicted(chain(7, 8)[1])]


def test_what_has_no_room_is_declined() -> None:
    store = plain(slots=2)
    granted = store.store("a", chain(1, 2, 3))
    assert (granted.indices, granted.declined) == ([0, 1], 1)
    assert store.store("b", chain(4)).declined == 1


def test_one_owner_writes_to_no_more_than_its_share_of_the_slots() -> None:
    store = Store(TierSizes(slots=8), TicketLimits(owner_share=0.25))
    assert len(store.store("a", chain(1, 2, 3)).slots) == 2
    assert store.store("a", chain(4)).slots == []
    assert len(store.store("b", chain(5)).slots) == 1


def test_a_block_not_seen_often_enough_for_the_host_tier_is_declined_once() -> None:
    store, contents = Store(TierSizes(slots=4, host_sightings=2)), chain(1)
    assert store.store("a", contents).declined == 1
    assert len(store.store("b", contents).slots) == 1


# --- refusals


def test_a_commit_after_the_deadline_is_refused_and_its_slots_are_free_again() -> None:
    store, contents = plain(), chain(1)
    granted = store.store("a", contents, now_s=0)
    with pytest.raises(TicketExpired):
        store.tickets.commit("a", granted.ticket, granted.slots, now_s=10)
    store.tickets.validate()
    assert store.tiers.statistics().host.free == 8
    with pytest.raises(UnknownTicket):
        store.tickets.commit("a", granted.ticket, granted.slots, now_s=10)


def test_a_commit_of_slots_that_were_not_granted_changes_nothing() -> None:
    store, contents = plain(), chain(1)
    granted = store.store("a", contents)
    other = store.store("b", chain(2))
    with pytest.raises(BadRequest, match="was not granted"):
        store.tickets.commit("a", granted.ticket, [*granted.slots, *other.slots], 1)
    store.tickets.validate()
    assert store.tickets.commit("a", granted.ticket, granted.slots, 1) == [("host", ContentStored(contents[0]))]


def test_a_ticket_is_its_owners_alone() -> None:
    store, contents = plain(), chain(1)
    granted = store.store("a", contents)
    with pytest.raises(UnknownTicket):
        store.tickets.commit("b", granted.ticket, granted.slots, 1)
    store.tickets.abort("b", granted.ticket)
    assert len(store.tickets.commit("a", granted.ticket, granted.slots, 1)) == 1
    fetched = store.fetch(contents, owner="b")
    store.tickets.release("a", fetched.ticket)
    assert store.tickets.statistics().fetches == 1


def test_a_ticket_of_the_other_kind_is_refused_and_stays() -> None:
    store, contents = plain(), chain(1)
    granted = store.store("b", contents)
    with pytest.raises(BadRequest, match="commit or abort"):
        store.tickets.release("b", granted.ticket)
    store.tickets.commit("b", granted.ticket, granted.slots, 1)
    fetched = store.fetch(contents)
    with pytest.raises(BadRequest, match="release"):
        store.tickets.abort("b", fetched.ticket)
    with pytest.raises(BadRequest, match="release"):
        store.tickets.commit("b", fetched.ticket, [], 1)
    assert store.tickets.statistics().fetches == 1


def test_an_engine_that_has_not_attached_is_refused() -> None:
    tickets = plain().tickets
    with pytest.raises(UnknownOwner):
        tickets.store("c", chain(1), 0)
    with pytest.raises(UnknownOwner):
        tickets.fetch("c", keys(chain(1)), 0)
    with pytest.raises(UnknownOwner):
        tickets.commit("c", 1, [0], 0)
    tickets.abort("c", 1)
    tickets.release("c", 1)
    assert tickets.worker_lease_lost("c") == []


@pytest.mark.parametrize("length", [0, 15, 17])
def test_keys_of_a_wrong_length_are_refused(length: int) -> None:
    tickets = plain().tickets
    good, bad = chain(1)[0], bytes(length)
    with pytest.raises(BadRequest, match="16 bytes"):
        tickets.fetch("a", [good.key, bad], 0)
    with pytest.raises(BadRequest, match="16 bytes"):
        tickets.store("a", [Content(key=bad, parent=None, tokens=b"")], 0)
    with pytest.raises(BadRequest, match="16 bytes"):
        tickets.store("a", [Content(key=good.key, parent=bad, tokens=b"")], 0)
    tickets.validate()


def test_a_prefix_with_a_block_twice_is_refused() -> None:
    (content,) = chain(1)
    with pytest.raises(BadRequest, match="twice"):
        plain().fetch([content, content])


def test_too_many_blocks_and_too_many_tickets_are_refused() -> None:
    store = plain(slots=30)
    with pytest.raises(BadRequest, match="7 blocks"):
        store.store("a", chain(*range(7)))
    with pytest.raises(BadRequest, match="7 blocks"):
        store.fetch(chain(*range(7)))
    for token in range(3):
        store.store("a", chain(token))
    with pytest.raises(TooManyTickets):
        store.store("a", chain(9))
    with pytest.raises(TooManyTickets):
        store.fetch(chain(9), owner="a")
    assert store.store("b", chain(9)).ticket


# --- time


def test_an_expired_stores_slots_stay_unused_until_its_owner_answers() -> None:
    store = plain(slots=2)
    granted = store.store("a", chain(1, 2), now_s=0)
    assert store.tickets.expire(9.9) == []
    (expired,) = store.tickets.expire(10)
    assert (expired.owner, expired.ticket, expired.kind, expired.slots) == ("a", granted.ticket, "store", granted.slots)
    store.tickets.validate()
    assert store.store("b", chain(1, 2)).declined == 2
    store.tickets.abort("a", granted.ticket)
    assert len(store.store("b", chain(1, 2)).slots) == 2


def test_an_owner_whose_store_expired_long_ago_must_attach_again_before_a_new_request() -> None:
    store = plain(slots=4)
    store.store("a", chain(1, 2), now_s=0)  # its answer never came, or another one's did
    store.tickets.expire(10)
    assert store.store("a", chain(3), now_s=19.9).ticket
    for asks in (lambda: store.store("a", chain(4), now_s=20), lambda: store.tickets.fetch("a", keys(chain(4)), 20)):
        with pytest.raises(UnknownOwner, match="attach again"):
            asks()
    assert store.store("b", chain(4), now_s=20).ticket
    store.tickets.attach("a")
    assert store.tickets.statistics().tiers.host.quarantined == 0
    assert store.store("a", chain(1, 2), now_s=20).ticket


def test_a_frozen_owners_expired_tickets_count_among_those_it_may_have() -> None:
    store = plain()
    for token in range(3):
        store.store("a", chain(token), now_s=0)
    store.tickets.expire(10)
    with pytest.raises(TooManyTickets):
        store.store("a", chain(5), now_s=11)


def test_an_expired_fetch_holds_nothing_any_more() -> None:
    store, contents = plain(slots=2), chain(1, 2)
    store.keep(contents)
    fetched = store.fetch(contents, now_s=0)
    assert store.store("a", chain(3)).slots == []
    (expired,) = store.tickets.expire(20)
    assert (expired.kind, expired.slots) == ("fetch", fetched.slots)
    assert len(store.store("a", chain(3)).slots) == 1
    store.tickets.release("b", fetched.ticket)


def test_a_lost_lease_ends_the_time_of_an_owners_tickets_at_once() -> None:
    store, contents = plain(), chain(1)
    store.keep(contents)
    store.store("b", chain(2), now_s=0)
    store.fetch(contents, now_s=0)
    assert [one.kind for one in store.tickets.worker_lease_lost("b")] == ["store", "fetch"]
    assert store.tickets.worker_lease_lost("b") == []
    store.tickets.validate()
    assert store.tiers.statistics().host.quarantined == 1


# --- owners end


def test_an_owner_that_dies_between_store_and_commit_leaks_and_publishes_nothing() -> None:
    store, contents = plain(), chain(1, 2)
    store.keep(contents[:1])
    store.store("b", chain(5), now_s=0)
    store.tickets.expire(10)
    store.store("b", contents, now_s=11)
    store.fetch(contents[:1], now_s=11)
    store.tickets.owner_dead("b")
    store.tickets.validate()
    counts = store.tiers.statistics().host
    assert (counts.free, counts.ready, counts.held, counts.quarantined) == (7, 1, 0, 0)
    with pytest.raises(UnknownOwner):
        store.store("b", contents)


def test_an_owner_that_attaches_again_has_nothing_under_way() -> None:
    store, contents = plain(), chain(1)
    granted = store.store("a", contents)
    store.tickets.attach("a")
    store.tickets.validate()
    assert store.tiers.statistics().host.free == 8
    with pytest.raises(UnknownTicket):
        store.tickets.commit("a", granted.ticket, granted.slots, 1)


# --- a kvbm that is restarted


def test_after_a_restart_no_slot_is_given_until_all_owners_of_before_have_answered_or_are_dead() -> None:
    store = Store(TierSizes(slots=4), before=("a", "b", "elsewhere"), owners=())
    store.tickets.attach("a")
    store.tickets.validate()
    assert store.store("a", chain(1)).declined == 1
    store.tickets.owner_dead("b")
    assert store.tickets.statistics().awaited == 1
    assert store.store("a", chain(1)).declined == 1
    store.tickets.writer_confirmed_idle("elsewhere")
    store.tickets.validate()
    assert len(store.store("a", chain(1)).slots) == 1


def test_after_a_restart_blocks_on_disk_wait_for_a_slot() -> None:
    store, contents = Store(TierSizes(slots=4, records=4), before=("a",), owners=()), chain(1, 2)
    store.tickets.attach("b")
    store.tiers.disk_failed()
    store.tiers.disk_ready([FoundBlock(0, contents[0]), FoundBlock(1, contents[1])])
    assert store.fetch(contents).ticket == 0
    store.tickets.owner_dead("a")
    assert len(store.fetch(contents).reads) == 2


def test_the_tickets_of_a_restarted_kvbm_begin_at_its_first_ticket() -> None:
    tickets = Tickets(Tiers(TierSizes(slots=2), LruPolicy(10), LruPolicy(10)), TicketLimits(), first_ticket=500)
    tickets.attach("a")
    assert tickets.store("a", chain(1), 0).ticket == 500


# --- fetch


def test_a_fetched_block_stays_until_it_is_released() -> None:
    store, contents = plain(slots=2), chain(1, 2)
    store.keep(contents)
    fetched = store.fetch(contents[:1])
    assert store.store("a", chain(5, 6)).events == [("host", ContentEvicted(contents[1]))]
    store.tickets.release("b", fetched.ticket)
    store.tickets.release("b", fetched.ticket)
    store.tickets.validate()
    assert store.store("a", chain(7)).events == [("host", ContentEvicted(contents[0]))]


def test_a_fetch_ends_at_the_first_block_that_is_in_no_tier() -> None:
    store, contents = plain(), chain(1, 2, 3)
    store.keep([contents[0], contents[2]])
    fetched = store.fetch(contents)
    assert len(fetched.slots) == 1


def test_readers_hold_no_more_than_their_share_of_the_host_tier() -> None:
    store, contents = Store(TierSizes(slots=4, held_share=0.5)), chain(1, 2, 3, 4)
    for content in contents:
        store.keep([content])
    assert len(store.fetch(contents).slots) == 2
    assert len(store.fetch(contents, owner="a").slots) == 2, "slots that are held already cost nothing"
    assert store.fetch(contents[2:]).slots == []


def test_what_is_in_memory_comes_first_and_what_is_on_disk_as_it_comes() -> None:
    store, contents = with_disk(), chain(1, 2, 3)
    store.on_disk_only(contents)
    store.keep(contents[:1])
    fetched = store.fetch(contents, now_s=0)
    assert (fetched.ready, len(fetched.slots), len(fetched.loading)) == (1, 3, 2)
    second, third = fetched.reads
    assert [second.content, third.content] == contents[1:]

    advanced, events = store.tickets.read_done(third, "ok", 5)
    store.tickets.validate()
    assert advanced == [], "the one before it is still missing"
    assert events == [("host", ContentStored(contents[2]))]

    (news,), events = store.tickets.read_done(second, "ok", 6)
    store.tickets.validate()
    assert (news.owner, news.ticket, news.first, news.slots) == ("b", fetched.ticket, 1, fetched.slots[1:])
    assert (news.from_disk, news.found, news.time_left_s) == ([True, True], 3, 20)


def test_two_fetches_wait_for_one_read() -> None:
    store, contents = with_disk(), chain(1)
    store.on_disk_only(contents)
    first, second = store.fetch(contents, owner="a"), store.fetch(contents, owner="b")
    assert second.reads == []
    assert first.slots == second.slots
    advanced, _ = store.tickets.read_done(first.reads[0], "ok", 1)
    assert [news.ticket for news in advanced] == [first.ticket, second.ticket]


@pytest.mark.parametrize("outcome", ["lost", "failed"])
def test_a_read_that_fails_makes_the_prefix_shorter(outcome: str) -> None:
    store, contents = with_disk(), chain(1, 2, 3)
    store.on_disk_only(contents)
    fetched = store.fetch(contents)
    first, second, third = fetched.reads
    (news,), _ = store.tickets.read_done(first, "ok", 1)
    assert news.found == 3
    (news,), events = store.tickets.read_done(second, "lost" if outcome == "lost" else "failed", 1)
    store.tickets.validate()
    assert (news.first, news.slots, news.found) == (1, [], 1)
    assert events == ([("disk", ContentEvicted(contents[1]))] if outcome == "lost" else [])
    advanced, events = store.tickets.read_done(third, "ok", 1)
    store.tickets.validate()
    assert (advanced, events) == ([], [("host", ContentStored(contents[2]))]), "nobody waits for it, and it is kept"


def test_a_fetch_whose_first_read_fails_has_ended() -> None:
    store, contents = with_disk(), chain(1)
    store.on_disk_only(contents)
    fetched = store.fetch(contents)
    (news,), _ = store.tickets.read_done(fetched.reads[0], "lost", 1)
    assert news.found == 0
    assert store.tickets.statistics().fetches == 0
    store.tickets.release("b", fetched.ticket)


def test_a_slot_that_the_disk_writes_to_outlives_the_fetch_that_wanted_it() -> None:
    store, contents = with_disk(slots=1), chain(1)
    store.on_disk_only(contents)
    fetched = store.fetch(contents, now_s=0)
    store.tickets.expire(20)
    store.tickets.validate()
    assert store.store("a", chain(5)).declined == 1
    advanced, events = store.tickets.read_done(fetched.reads[0], "ok", 21)
    assert (advanced, events) == ([], [("host", ContentStored(contents[0]))])
    assert len(store.store("a", chain(5)).slots) == 1


def test_a_fetch_with_no_room_for_what_is_on_disk_ends_before_it() -> None:
    store, contents = with_disk(slots=2), chain(1, 2)
    store.on_disk_only(contents)
    store.store("a", chain(8, 9))
    assert store.fetch(contents).ticket == 0


def test_a_block_that_is_fetched_does_not_go_for_one_that_is_read_from_disk() -> None:
    store, contents = with_disk(slots=2), chain(1, 2)
    store.on_disk_only(contents)
    store.keep(contents[1:])
    fetched = store.fetch(contents)
    assert len(fetched.slots) == 2
    assert fetched.events == [("host", ContentEvicted(chain(1000, 1001)[0]))]


def test_a_worker_that_stores_what_comes_from_disk_meanwhile_succeeds_and_keeps_no_second_slot() -> None:
    store, contents = with_disk(), chain(1)
    store.on_disk_only(contents)
    granted = store.store("a", contents)
    fetched = store.fetch(contents)
    store.tickets.read_done(fetched.reads[0], "ok", 1)
    assert store.tickets.commit("a", granted.ticket, granted.slots, 1) == []
    assert store.fetch(contents, now_s=1).ready == 1


def test_a_worker_that_commits_what_is_still_coming_from_disk_succeeds_and_keeps_no_second_slot() -> None:
    store, contents = with_disk(), chain(1)
    store.on_disk_only(contents)
    granted = store.store("a", contents)
    fetched = store.fetch(contents)
    assert store.tickets.commit("a", granted.ticket, granted.slots, 1) == []
    store.tickets.validate()
    _, events = store.tickets.read_done(fetched.reads[0], "ok", 1)
    store.tickets.validate()
    assert events == [("host", ContentStored(contents[0]))]


def test_a_fetch_whose_time_began_again_ends_after_one_that_began_later() -> None:
    store, contents = with_disk(), chain(1)
    store.on_disk_only(contents)
    store.keep(chain(7), now_s=0)
    first = store.fetch(contents, now_s=0)
    second = store.fetch(chain(7), now_s=1, owner="a")
    store.tickets.read_done(first.reads[0], "ok", 5)
    store.tickets.validate()
    assert [one.ticket for one in store.tickets.expire(21)] == [second.ticket]
    assert [one.ticket for one in store.tickets.expire(25)] == [first.ticket]


# --- blocks that a fetch awaits


def awaiting(store: Store, contents: list[Content], now_s: float = 0.0, owner: str = "b") -> HeldPrefix:
    fetched = store.tickets.fetch(owner, keys(contents), now_s, awaits=True)
    store.tickets.validate()
    return fetched


def committed(store: Store, contents: list[Content], now_s: float = 0.0) -> list[FetchProgress]:
    """Store and commit as owner a; return the progress of fetches that awaited it."""
    progress = store.tickets.hold_awaited(store.keep(contents, now_s), now_s)
    store.tickets.validate()
    return progress


def test_awaited_blocks_are_held_as_they_are_committed_until_all_are_there() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0)), chain(1, 2, 3, 4)
    store.keep(wanted[:1])
    fetched = awaiting(store, wanted)
    assert (len(fetched.slots), fetched.awaited) == (1, 3)
    (first,) = committed(store, wanted[:3], 5.0)
    assert (first.ticket, first.first, len(first.slots), first.found, first.time_left_s) == (
        fetched.ticket,
        1,
        2,
        4,
        20,
    )
    (last,) = committed(store, wanted, 6.0)
    assert (last.first, len(last.slots), last.found) == (3, 1, 4)
    assert store.tiers.statistics().host.held == 4
    store.tickets.release("b", fetched.ticket)
    assert store.tiers.statistics().host.held == 0


def test_a_block_that_is_committed_before_its_parent_is_held_with_it() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0)), chain(1, 2, 3)
    assert awaiting(store, wanted).awaited == 3
    granted = store.store("a", wanted)
    assert store.tickets.hold_awaited(store.tickets.commit("a", granted.ticket, granted.slots[1:], 0), 0) == []
    (progress,) = committed(store, wanted[:1])
    assert (progress.first, len(progress.slots), progress.found) == (0, 3, 3)


def test_a_block_that_a_fetch_awaits_is_kept_though_it_was_seen_too_rarely() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0, host_sightings=3)), chain(1, 2)
    assert store.store("a", wanted).declined == 2
    awaiting(store, wanted)
    assert len(store.store("a", wanted).slots) == 2


def test_what_is_awaited_ends_with_the_ticket_its_owner_or_its_time() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0)), chain(1, 2)
    ends: list[Callable[[int], object]] = [
        lambda ticket: store.tickets.release("b", ticket),
        lambda _: store.tickets.attach("b"),
        lambda _: store.tickets.worker_lease_lost("b"),
        lambda _: store.tickets.expire(20),
    ]
    for end in ends:
        ticket = awaiting(store, wanted).ticket
        assert ticket
        end(ticket)
        store.tickets.validate()
        assert store.tickets.statistics().fetches == 0
    assert committed(store, wanted) == []


def test_each_commit_begins_the_time_of_the_ticket_again() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0)), chain(1, 2, 3)
    awaiting(store, wanted)
    committed(store, wanted[:1], 15.0)
    assert store.tickets.expire(30) == []
    assert len(store.tickets.expire(35)) == 1


def test_what_is_on_disk_is_read_and_not_awaited() -> None:
    store, wanted = Store(TierSizes(slots=2, records=4)), chain(1, 2)
    store.on_disk_only(wanted)
    assert awaiting(store, wanted[:1]).awaited == 0


def test_beyond_the_bound_a_fetch_awaits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "AWAITED_MOST", 3)
    store = Store(TierSizes(slots=8, records=0))
    assert awaiting(store, chain(1, 2)).awaited == 2
    more = awaiting(store, chain(3, 4))
    assert (more.awaited, more.ticket) == (0, 0)
    assert awaiting(store, chain(5)).awaited == 1


def test_where_no_more_slots_may_be_held_the_prefix_ends() -> None:
    store, wanted = Store(TierSizes(slots=8, records=0, held_share=0.25)), chain(1, 2, 3)
    fetched = awaiting(store, wanted)
    (progress,) = committed(store, wanted)
    assert (len(progress.slots), progress.found) == (2, 2), "a quarter of eight slots"
    assert progress.ticket == fetched.ticket
