"""Tickets: which engine may write to or read from which slots, and until when. Pure.

    store ──▶ writing ──commit──▶ ended: the written blocks can be found, the other slots are free
                 │ ├────abort, attach, death ──▶ ended: all its slots are free, nothing can be found
                 │ deadline
                 ▼
              expired ──commit (refused), abort, attach, death ──▶ ended: its slots leave quarantine

    fetch ──▶ reading ──release, attach, death, deadline ──▶ ended: its slots are no longer held
                 └◀─┘ a read of the disk has ended, or an awaited block was committed: more of the prefix is there,
                      or it is shorter
    lend  ──▶ reading, without a deadline: the network may send a slot, and looks at no generation

An owner is one engine process. It proves that it has stopped writing by ending the ticket or by attaching again; its
death, which the kernel's lock on its file proves, does the same. A deadline proves nothing about a writer, so no other
engine gets the slots of an expired store. For a reader a deadline is enough, since a reader looks at the slot's
generation after it has copied. A frozen owner keeps at most its share of the slots.

An owner that makes a new request long after a store of its own expired does not know of the ticket: a message came
twice, or a reply was lost. It is refused with UnknownOwner, so that it attaches again.

A kvbm that starts again knows no former ticket. All slots are in quarantine until each former owner has attached again,
here or to another layout (`writer_confirmed_idle`), or is dead.

`now_s` is any clock that never goes back. Methods raise the errors of `errors.py`. The shell must do what they return:
publish events in order, start reads, and grow the generation of each granted or loading slot before it names the slot
to an engine. Spills, and the disk's failing and coming up, are between the shell and `Tiers`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import dropwhile, takewhile

from msgspec import Struct
from msgspec.structs import replace

from services.kvbm.tickets.awaited import AwaitedBlocks
from services.kvbm.tickets.errors import BadRequest, TicketExpired, TooManyTickets, UnknownOwner, UnknownTicket
from services.kvbm.tickets.results import ExpiredTicket, FetchProgress, TicketLimits, TicketStatistics
from services.kvbm.tiers.actions import HeldPrefix, Offered, Read, ReadOutcome, TierEvent
from services.kvbm.tiers.tiers import Tiers
from shared.blocks import Content, ContentStored
from shared.hashing import KEY_BYTES, ContentKey


class _Owner(Struct):
    tickets: set[int]
    writing: int = 0
    """The number of slots of its stores, including quarantined ones."""


class _Store(Struct):
    owner: str
    slots: list[int]
    """The slots in the order of the grant: a prefix's first block first."""
    deadline_s: float


class _Fetch(Struct):
    owner: str
    slots: list[int]
    ready: int
    """The number of leading slots that can be read."""
    from_disk: set[int]
    """The indices of slots whose blocks come from disk."""
    deadline_s: float
    """Infinite for what is lent."""


class Tickets:
    """The tickets of one layout. Ids begin with `first_ticket`; a kvbm that starts again chooses it so that no former
    ticket is mistaken for its own. `former_owners` are the engines that the former kvbm may have let write."""

    def __init__(
        self, tiers: Tiers, limits: TicketLimits, *, former_owners: Collection[str] = (), first_ticket: int = 1
    ) -> None:
        assert first_ticket > 0, "0 is no ticket"
        self.limits = limits
        self._tiers = tiers
        self._owners: dict[str, _Owner] = {}
        self._stores: OrderedDict[int, _Store] = OrderedDict()
        self._fetches: OrderedDict[int, _Fetch] = OrderedDict()
        """Both dicts are ordered by deadline: all tickets of a kind last equally long. What is lent comes first."""
        self._expired: dict[int, _Store] = {}
        """Expired stores, which wait for their owners."""
        self._awaited = AwaitedBlocks()
        self._waiting: dict[int, set[int]] = {}
        """Loading slot → the fetches that wait for it, if any do."""
        self._former_owners = set(former_owners)
        self._next_ticket = first_ticket
        host = tiers.statistics().host
        self._startup_quarantine = list(range(host.capacity)) if host.quarantined else []
        """Slots that are in quarantine since the start."""
        assert host.quarantined in (0, host.capacity), "tiers that are in use already"
        self._writing_limit = max(1, int(host.capacity * limits.owner_share))
        self._release_startup_quarantine()

    # --- owners

    def attach(self, owner: str) -> None:
        """Attach the owner, which may store and fetch from now on. All its tickets end: it says that nothing of its own
        is under way."""
        self._end_tickets_of(owner)
        self._owners[owner] = _Owner(set())
        self.writer_confirmed_idle(owner)

    def writer_confirmed_idle(self, owner: str) -> None:
        """Record that the owner, which may be another layout's, writes to no slot that a former kvbm granted it."""
        self._former_owners.discard(owner)
        self._release_startup_quarantine()

    def owner_dead(self, owner: str) -> None:
        """End all of an owner whose lock the kernel has released. Unknown owners are ignored."""
        self._end_tickets_of(owner)
        self._owners.pop(owner, None)
        self.writer_confirmed_idle(owner)

    def worker_lease_lost(self, owner: str) -> list[ExpiredTicket]:
        """Expire all open tickets of an owner whose worker has lost its lease."""
        known = self._owners.get(owner)
        open_ones = sorted(known.tickets.difference(self._expired)) if known else ()
        return [self._expire(ticket) for ticket in open_ones]

    def _end_tickets_of(self, owner: str) -> None:
        known = self._owners.get(owner)
        for ticket in list(known.tickets) if known else ():
            if ticket in self._fetches:
                self._end_fetch(ticket)
            else:
                self._tiers.free_slots(self._end_store(ticket).slots)

    def _release_startup_quarantine(self) -> None:
        if self._startup_quarantine and not self._former_owners:
            self._tiers.free_slots(self._startup_quarantine)
            self._startup_quarantine = []

    # --- store

    def store(self, owner: str, contents: Sequence[Content], now_s: float) -> Offered:
        """Grant slots for those of the blocks that are new and worth keeping; a prefix comes first block first. Raises
        BadRequest, UnknownOwner, TooManyTickets."""
        for content in contents:
            if len(content.key) != KEY_BYTES or (content.parent is not None and len(content.parent) != KEY_BYTES):
                raise BadRequest(f"a content key has {KEY_BYTES} bytes: {content.key.hex()} after {content.parent!r}")
        known = self._admit(owner, len(contents), now_s)
        offered = self._tiers.offer(contents, max(0, self._writing_limit - known.writing), self._awaited)
        if not offered.slots:
            return offered
        ticket = self._open(known)
        self._stores[ticket] = _Store(owner, offered.slots, now_s + self.limits.store_time_s)
        known.writing += len(offered.slots)
        return replace(offered, ticket=ticket)

    def commit(self, owner: str, ticket: int, slots: Collection[int], now_s: float) -> list[TierEvent]:
        """End a store ticket: these of its slots are written, the others never will be. Raise UnknownOwner,
        UnknownTicket, TicketExpired, BadRequest."""
        if owner not in self._owners:
            raise UnknownOwner(owner)
        store = self._store_of(owner, ticket)
        if store is None:
            raise UnknownTicket(owner, ticket)
        written = set(slots)
        strange = written.difference(store.slots)
        if strange:
            raise BadRequest(f"slot {min(strange)} was not granted under ticket {ticket}")
        if ticket in self._stores and now_s >= store.deadline_s:
            self._expire(ticket)
        late = ticket in self._expired
        self._end_store(ticket)
        if late:
            self._tiers.free_slots(store.slots)
            raise TicketExpired(owner, ticket)
        self._tiers.free_slots(slot for slot in store.slots if slot not in written)
        return self._tiers.publish([slot for slot in store.slots if slot in written])

    def abort(self, owner: str, ticket: int) -> None:
        """End a store ticket: its owner has stopped writing, and nothing is published. Unknown tickets are ignored.
        Raise BadRequest."""
        if self._store_of(owner, ticket) is not None:
            self._tiers.free_slots(self._end_store(ticket).slots)

    # --- fetch

    def fetch(self, owner: str, keys: Sequence[ContentKey], now_s: float, *, awaits: bool = False) -> HeldPrefix:
        """Hold the longest prefix of the keys that is stored. With `awaits`, and as long as the ticket's time lasts,
        hold each further block as soon as it is committed (`hold_awaited`). Raise BadRequest, UnknownOwner,
        TooManyTickets."""
        for key in keys:
            if len(key) != KEY_BYTES:
                raise BadRequest(f"a content key has {KEY_BYTES} bytes: {key.hex()}")
        if len(set(keys)) != len(keys):
            raise BadRequest("the prefix has a block twice")
        known = self._admit(owner, len(keys), now_s)
        found = self._tiers.fetch(keys)
        rest = self._awaitable(keys[len(found.slots) :]) if awaits else ()
        if not found.slots and not rest:
            return found
        ticket = self._open(known)
        deadline_s = now_s + self.limits.fetch_time_s
        self._fetches[ticket] = _Fetch(owner, list(found.slots), found.ready, set(found.loading), deadline_s)
        self._awaited.replace(ticket, rest)
        for index in found.loading:
            self._waiting.setdefault(found.slots[index], set()).add(ticket)
        return replace(found, ticket=ticket, awaited=len(rest))

    def _awaitable(self, rest: Sequence[ContentKey]) -> Sequence[ContentKey]:
        """Return the blocks that a fetch awaits after its prefix: all of the rest, or none."""
        return rest if rest and self._tiers.may_come(rest[0]) and self._awaited.has_room(len(rest)) else ()

    def hold_awaited(self, events: Sequence[TierEvent], now_s: float) -> list[FetchProgress]:
        """Hold the blocks that came into memory with these events, for the fetches that await them; return their
        progress."""
        progress: list[FetchProgress] = []
        for tier, event in events:
            if tier == "host" and isinstance(event, ContentStored):
                for ticket in self._awaited.waiting_for(event.content.key):
                    first, rest = self._fetches[ticket].ready, self._awaited.keys(ticket)
                    self._awaited.replace(ticket, ())
                    held = self._tiers.fetch(rest, memory_only=True).slots
                    self._fetches[ticket].slots += held
                    self._awaited.replace(ticket, self._awaitable(rest[len(held) :]) if held else ())
                    ended = not self._awaited.keys(ticket)
                    if self._advance(ticket, now_s) > first or ended:
                        progress.append(self._progress(ticket, first, now_s))
        return progress

    def lend(self, owner: str, keys: Sequence[ContentKey], now_s: float) -> HeldPrefix:
        """Hold what is in memory of the longest prefix, until the owner releases it or ends. Raise as `fetch`."""
        known = self._admit(owner, len(keys), now_s)
        if len(set(keys)) != len(keys):
            raise BadRequest("the prefix has a block twice")
        found = self._tiers.fetch(keys, memory_only=True)
        if not found.slots:
            return found
        ticket = self._open(known)
        self._fetches[ticket] = _Fetch(owner, list(found.slots), len(found.slots), set(), math.inf)
        self._fetches.move_to_end(ticket, last=False)
        return replace(found, ticket=ticket)

    def release(self, owner: str, ticket: int) -> None:
        """End a fetch ticket: its owner has stopped reading. Unknown tickets are ignored. Raise BadRequest."""
        fetch = self._fetches.get(ticket)
        if fetch is not None and fetch.owner == owner:
            self._end_fetch(ticket)
        elif fetch is None and self._has_ticket(owner, ticket):
            raise BadRequest(f"ticket {ticket} is a store's: commit or abort it")

    # --- wrong blocks

    def discard(self, owner: str, keys: Sequence[ContentKey]) -> tuple[list[int], list[TierEvent]]:
        """Discard these blocks: they cannot be found any more, and what is being written or loaded of them will not be
        kept. Return the slots that had them, which fetches may read until they end, and the events. Raise BadRequest,
        UnknownOwner."""
        if owner not in self._owners:
            raise UnknownOwner(owner)
        self.check_block_count(len(keys))
        return self._tiers.discard(keys)

    # --- the disk reports

    def read_done(self, read: Read, outcome: ReadOutcome, now_s: float) -> tuple[list[FetchProgress], list[TierEvent]]:
        """End a read. Return the progress of the fetches that waited for it, and the events. Each read ends exactly
        once, whatever became of the fetch that it was started for."""
        waiting = sorted(self._waiting.pop(read.slot, ()))
        if outcome == "ok" and self._tiers.is_condemned(read.slot):
            outcome = "lost"
        if outcome != "ok":
            for ticket in waiting:
                self._shorten(ticket, self._fetches[ticket].slots.index(read.slot))
        events = self._tiers.read_done(read, outcome)
        advanced: list[FetchProgress] = []
        for ticket in waiting:
            first = self._fetches[ticket].ready
            ready = self._advance(ticket, now_s)
            if ready > first or outcome != "ok":
                advanced.append(self._progress(ticket, first, now_s))
        return advanced, events

    def _shorten(self, ticket: int, end: int) -> None:
        """End the fetch's prefix before this index; the fetch waits for no later slot or block."""
        fetch = self._fetches[ticket]
        self._awaited.replace(ticket, ())
        for slot in fetch.slots[max(end, fetch.ready) :]:
            waiting = self._waiting.get(slot)
            if waiting is not None:
                waiting.discard(ticket)
                if not waiting:
                    del self._waiting[slot]
        self._tiers.release(fetch.slots[end:])
        del fetch.slots[end:]

    def _advance(self, ticket: int, now_s: float) -> int:
        """Return how many leading slots can be read now. If they are more than before, the ticket's time starts
        again."""
        fetch = self._fetches[ticket]
        first = fetch.ready
        while fetch.ready < len(fetch.slots) and not self._tiers.is_loading(fetch.slots[fetch.ready]):
            fetch.ready += 1
        if fetch.ready > first and now_s < fetch.deadline_s:
            fetch.deadline_s = now_s + self.limits.fetch_time_s
            self._fetches.move_to_end(ticket)
        return fetch.ready

    def _progress(self, ticket: int, first: int, now_s: float) -> FetchProgress:
        fetch, awaited = self._fetches[ticket], len(self._awaited.keys(ticket))
        if not fetch.slots and not awaited:
            self._end_fetch(ticket)
        return FetchProgress(
            owner=fetch.owner,
            ticket=ticket,
            time_left_s=max(0.0, fetch.deadline_s - now_s),
            first=first,
            slots=fetch.slots[first : fetch.ready],
            from_disk=[index in fetch.from_disk for index in range(first, fetch.ready)],
            found=len(fetch.slots) + awaited,
        )

    # --- time

    def expire(self, now_s: float) -> list[ExpiredTicket]:
        """Expire all tickets whose deadline has come."""
        due = list(takewhile(lambda ticket: self._stores[ticket].deadline_s <= now_s, self._stores))
        timed = dropwhile(lambda ticket: math.isinf(self._fetches[ticket].deadline_s), self._fetches)
        due += takewhile(lambda ticket: self._fetches[ticket].deadline_s <= now_s, timed)
        return [self._expire(ticket) for ticket in due]

    def _expire(self, ticket: int) -> ExpiredTicket:
        store = self._stores.pop(ticket, None)
        if store is None:
            fetch = self._fetches[ticket]
            slots = list(fetch.slots)
            self._end_fetch(ticket)
            return ExpiredTicket(fetch.owner, ticket, "fetch", slots)
        self._expired[ticket] = store
        self._tiers.quarantine(store.slots)
        return ExpiredTicket(store.owner, ticket, "store", list(store.slots))

    # --- inside

    def _admit(self, owner: str, blocks: int, now_s: float) -> _Owner:
        """Return the owner, if it may open one more ticket."""
        known = self._owners.get(owner)
        if known is None:
            raise UnknownOwner(owner)
        long_ago_s = now_s - self.limits.store_time_s
        if any(self._expired[ticket].deadline_s <= long_ago_s for ticket in known.tickets & self._expired.keys()):
            raise UnknownOwner(owner, "has a store that expired long ago: it must attach again")
        self.check_block_count(blocks)
        if len(known.tickets) >= self.limits.tickets_per_owner:
            raise TooManyTickets(owner, self.limits.tickets_per_owner)
        return known

    def _open(self, owner: _Owner) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        owner.tickets.add(ticket)
        return ticket

    def _has_ticket(self, owner: str, ticket: int) -> bool:
        known = self._owners.get(owner)
        return known is not None and ticket in known.tickets

    def _store_of(self, owner: str, ticket: int) -> _Store | None:
        """Return the owner's store, expired or not; None if it has no such ticket."""
        if not self._has_ticket(owner, ticket):
            return None
        if ticket in self._fetches:
            raise BadRequest(f"ticket {ticket} belongs to a fetch: release it instead")
        return self._stores.get(ticket) or self._expired[ticket]

    def _end_store(self, ticket: int) -> _Store:
        """End the store. The caller frees or publishes its slots."""
        store = self._stores.pop(ticket, None) or self._expired.pop(ticket)
        owner = self._owners[store.owner]
        owner.tickets.remove(ticket)
        owner.writing -= len(store.slots)
        return store

    def _end_fetch(self, ticket: int) -> None:
        fetch = self._fetches[ticket]
        self._shorten(ticket, 0)
        del self._fetches[ticket]
        self._owners[fetch.owner].tickets.remove(ticket)

    # --- questions

    def check_block_count(self, blocks: int) -> None:
        """Raise BadRequest if one request has too many blocks. Call this before unpacking, which may be costly."""
        if blocks > self.limits.blocks_per_request:
            raise BadRequest(f"{blocks} blocks in one request, at most {self.limits.blocks_per_request} are allowed")

    def statistics(self) -> TicketStatistics:
        """Return counts, in O(1)."""
        return TicketStatistics(
            owners=len(self._owners),
            stores=len(self._stores),
            fetches=len(self._fetches),
            expired=len(self._expired),
            awaited=len(self._former_owners),
            tiers=self._tiers.statistics(),
        )

    def validate(self) -> None:
        """Raise AssertionError if tickets, owners and slots contradict one another. O(slots + records)."""
        tiers = self._tiers
        tiers.validate(slot for fetch in self._fetches.values() for slot in fetch.slots)
        stores = {**self._stores, **self._expired}
        tickets = {ticket: store.owner for ticket, store in stores.items()}
        tickets |= {ticket: fetch.owner for ticket, fetch in self._fetches.items()}
        assert len(tickets) == len(stores) + len(self._fetches), "a ticket is of two kinds"
        assert max(tickets, default=0) < self._next_ticket, "a ticket of the future"
        for name, owner in self._owners.items():
            assert owner.tickets == {ticket for ticket, its in tickets.items() if its == name}, f"{name}'s tickets"
            assert owner.writing == sum(len(store.slots) for store in stores.values() if store.owner == name), name
        assert set(tickets.values()) <= self._owners.keys(), "a ticket without an owner"
        writing = [slot for store in self._stores.values() for slot in store.slots]
        quarantined = [slot for store in self._expired.values() for slot in store.slots] + self._startup_quarantine
        host = tiers.statistics().host
        assert len({*writing, *quarantined}) == len(writing) + len(quarantined), "a slot has two writers"
        assert all(tiers.state(slot) == "writing" for slot in writing), "a granted slot is not writing"
        assert all(tiers.state(slot) == "quarantined" for slot in quarantined), "a quarantined slot is not"
        assert (len(writing), len(quarantined)) == (host.writing, host.quarantined), "a slot without its writer"
        assert not self._startup_quarantine or self._former_owners, "the startup quarantine waits for no owner"
        waiting: dict[int, set[int]] = {}
        for ticket, fetch in self._fetches.items():
            assert fetch.slots or self._awaited.keys(ticket), f"fetch {ticket} holds nothing"
            for index, slot in enumerate(fetch.slots):
                state = tiers.state(slot)
                there = ("ready", "leaving")
                assert state in there if index < fetch.ready else state in (*there, "loading"), f"slot {slot}: {state}"
                if state == "loading":
                    waiting.setdefault(slot, set()).add(ticket)
        assert waiting == self._waiting, "fetches wait for other slots than are loading"
        self._awaited.validate(self._fetches)
        for deadlines in (
            [store.deadline_s for store in self._stores.values()],
            [0.0 if math.isinf(fetch.deadline_s) else fetch.deadline_s for fetch in self._fetches.values()],
        ):
            assert deadlines == sorted(deadlines), "tickets out of order"
