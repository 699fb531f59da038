"""A kvbm in a drawer: the store's real tickets, tiers, pool file and locks below the wire's codecs, with no process,
no bus, and a disk that is a dictionary. It does what a kvbm's shell must do, at once, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from services.kvbm.pool.host_pool import HostPool
from services.kvbm.tickets.errors import Refusal, UnknownOwner
from services.kvbm.tickets.packing import (
    SlotChecksums,
    pack_slots,
    to_contents,
    unpack_checksums,
    unpack_keys,
    unpack_slots,
)
from services.kvbm.tickets.results import FetchProgress, TicketLimits
from services.kvbm.tickets.tickets import Tickets
from services.kvbm.tiers.actions import Read, ReadOutcome, Spill, TierEvent, TierSizes
from services.kvbm.tiers.disk_records import FoundBlock
from services.kvbm.tiers.policies import LruPolicy
from services.kvbm.tiers.tiers import Tiers
from services.worker.kv_connector.contract import KvbmAsk
from shared.blocks import Content, ContentStored
from shared.hashing import ContentKey, pack_hashes
from shared.messages import kvbm as wire

ARENA_BYTES = 1 << 16
"""Bytes of 16 slots, since each is a page."""
DISK_RECORDS = 12


class Drawer:
    """One kvbm on a pool's directory, of one layout; `close` and another one is a restart, the disk's dictionary goes
    with it."""

    def __init__(
        self,
        directory: Path,
        name: str,
        layout: wire.StoreLayout,
        bounds: TicketLimits,
        disk: dict[ContentKey, tuple[Content, bytes]],
        right: Callable[[Content], bytes] = lambda _: b"",
        pool_bytes: int = 2 * ARENA_BYTES,
    ) -> None:
        """`right`: how a block's bytes must begin, looked at whenever one is published."""
        self.name = name
        self.pool = HostPool.open(directory, pool_bytes)
        self.layout = layout
        self.slots = self.pool.assign_arena(layout.digest, layout.kv.block_bytes, ()).slots
        sizes = TierSizes(slots=self.slots.arena.slots, records=DISK_RECORDS, disk_sightings=1, spare_slots=1)
        host, records = LruPolicy(sizes.slots), LruPolicy(sizes.records)
        before = self.pool.survivors
        self.tiers = Tiers(sizes, host, records, quarantined=bool(before))
        self.tickets = Tickets(self.tiers, bounds, former_owners=before, first_ticket=1 + 1_000_000 * int(name[1:]))
        self.tiers.disk_ready([FoundBlock(index, content) for index, (content, _) in enumerate(disk.values())])
        self.disk = disk
        self.reads: list[Read] = []
        self.spills: list[Spill] = []
        self.advanced: dict[int, list[bytes]] = {}
        """Ticket → replies to a fetch beyond the first, the last one empty if no other will come."""
        self._right = right
        self.takes_discards = True
        self.checksums = SlotChecksums(self.slots.arena.slots)
        self.damaged: set[ContentKey] = set()
        """Once: engines may have stored it again before they saw it."""

    def answer(self, ask: KvbmAsk, now_s: float) -> tuple[list[bytes], int]:
        """The replies that come at once; and, where more will, the ticket that they belong to, else 0."""
        ticket = 0
        try:
            match ask.operation:
                case "attach":
                    replies = [wire.ATTACH_REPLY.encode(self._attach(wire.ATTACH.decode(ask.payload)))]
                case "store":
                    replies = [wire.STORE_REPLY.encode(self._store(wire.STORE.decode(ask.payload), now_s))]
                case "commit":
                    self._commit(wire.COMMIT.decode(ask.payload), now_s)
                    replies = [wire.SETTLED.encode(wire.Settled())]
                case "abort":
                    abort = wire.ABORT.decode(ask.payload)
                    self.tickets.abort(abort.owner, abort.ticket)
                    replies = [wire.SETTLED.encode(wire.Settled())]
                case "fetch":
                    fetched, more = self._fetch(wire.FETCH.decode(ask.payload), now_s)
                    replies = [wire.FETCH_REPLY.encode(fetched)]
                    ticket = fetched.ticket if more else 0
                case "release":
                    release = wire.RELEASE.decode(ask.payload)
                    self.tickets.release(release.owner, release.ticket)
                    replies = [wire.SETTLED.encode(wire.Settled())]
                case "discard":
                    self._discard(wire.DISCARD.decode(ask.payload))
                    replies = [wire.SETTLED.encode(wire.Settled())]
        except Refusal as refusal:
            replies = [wire.SETTLED.encode(wire.KvbmRefused(refusal.code, str(refusal)))]
        self._hear(self.tiers.prepare())
        return replies, ticket

    def _attach(self, attach: wire.Attach) -> wire.Attached:
        assert attach.layout == self.layout
        if not self.pool.owners.is_alive(attach.owner):
            raise UnknownOwner(attach.owner)
        self.tickets.attach(attach.owner)
        arena = self.slots.arena
        return wire.Attached(
            kvbm=self.name,
            layout=self.layout.digest,
            pool_bytes=self.pool.geometry.file_bytes,
            offset=arena.offset,
            slot_bytes=arena.slot_bytes,
            slots=arena.slots,
            generations=arena.generations,
            blocks_per_request=64,
            takes_discards=self.takes_discards,
        )

    def _store(self, store: wire.Store, now_s: float) -> wire.Granted:
        contents = to_contents(store.blocks, self.layout.kv.block_size)
        granted = self.tickets.store(store.owner, contents, now_s)
        self._hear(granted.events)
        for slot in granted.slots:
            self.slots.grant(slot)
        self.checksums.clear(granted.slots)
        return wire.Granted(
            granted.ticket, self.tickets.limits.store_time_s, granted.indices, pack_slots(granted.slots)
        )

    def _commit(self, commit: wire.Commit, now_s: float) -> None:
        slots = unpack_slots(commit.slots)
        events = self.tickets.commit(commit.owner, commit.ticket, slots, now_s)
        for slot, checksum in zip(slots, unpack_checksums(commit.checksums, len(slots)), strict=True):
            self.checksums.set(slot, checksum)
        self._hear(events)
        for news in self.tickets.hold_awaited(events, now_s):
            self._advance(news)

    def _fetch(self, fetch: wire.Fetch, now_s: float) -> tuple[wire.Fetched, bool]:
        found = self.tickets.fetch(fetch.owner, unpack_keys(fetch.keys), now_s, awaits=fetch.awaits)
        for read in found.reads:
            self.slots.grant(read.slot)
            self.checksums.clear((read.slot,))
        self.reads += found.reads
        self._hear(found.events)
        length = len(found.slots) + found.awaited
        more = found.ready < length
        if more:
            self.advanced[found.ticket] = []
        ready = found.slots[: found.ready]
        reply = self._fetched(found.ticket, self.tickets.limits.fetch_time_s, 0, ready, length, disk=False)
        return reply, more

    def _fetched(
        self, ticket: int, left_s: float, first: int, slots: list[int], found: int, *, disk: bool
    ) -> wire.Fetched:
        generations = pack_hashes(self.slots.generation(slot) for slot in slots)
        checksums = self.checksums.packed(slots)
        return wire.Fetched(ticket, left_s, first, pack_slots(slots), generations, disk, found, checksums)

    # --- wrong blocks

    def _discard(self, discard: wire.Discard) -> None:
        keys = unpack_keys(discard.keys)
        slots, events = self.tickets.discard(discard.owner, keys)
        for slot in slots:
            self.slots.grant(slot)
        self._hear(events)
        for record in self.tiers.take_erases():
            self.tiers.erase_done(record)
        for key in keys:
            self.disk.pop(key, None)

    def damage(self, draw: Random) -> None:
        """A bit of a block that can be found turns."""
        places = self.tiers._host.resident.places
        if places:
            key = draw.choice(sorted(places))
            self.damaged.add(key)
            self._memory(places[key])[draw.randrange(8)] ^= 1

    # --- the disk, and time

    def read(self, outcome: ReadOutcome, now_s: float) -> None:
        """The oldest read ends."""
        read = self.reads.pop(0)
        there = self.disk.get(read.content.key)
        if there is None:
            outcome = "lost"
        if outcome == "ok" and there is not None:
            self._memory(read.slot)[:] = there[1]
        advanced, events = self.tickets.read_done(read, outcome, now_s)
        for news in advanced:
            self._advance(news)
        self._hear(events)

    def _advance(self, news: FetchProgress) -> None:
        replies = self.advanced[news.ticket]
        disk = bool(news.from_disk)
        reply = self._fetched(news.ticket, news.time_left_s, news.first, news.slots, news.found, disk=disk)
        replies.append(wire.FETCH_REPLY.encode(reply))
        if news.first + len(news.slots) == news.found:
            replies.append(b"")

    def spill(self, most: int) -> None:
        """Some blocks are written to disk."""
        spills, events = self.tiers.take_spills(most)
        self._hear(events)
        for spill in spills:
            self._check(spill.content, spill.slot)
            for key, _ in [item for item in self.disk.items() if item[0] not in self.tiers_disk_keys]:
                del self.disk[key]
            self.disk[spill.content.key] = spill.content, bytes(self._memory(spill.slot))
            self._hear(self.tiers.spill_done(spill, "ok"))

    @property
    def tiers_disk_keys(self) -> set[ContentKey]:
        return {content.key for content in self.tiers.snapshot("disk")}

    def look(self, now_s: float) -> None:
        """Tickets whose time is over, and owners that have died."""
        for one in self.tickets.expire(now_s):
            if one.ticket in self.advanced:
                refused = wire.KvbmRefused("expired", "its time is over")
                self.advanced[one.ticket] += [wire.FETCH_REPLY.encode(refused), b""]
        for owner in self.pool.owners.poll():
            self.tickets.owner_dead(owner)

    def trouble(self, draw: Random, now_s: float) -> None:
        """Something that befalls a kvbm of its own."""
        if self.reads and draw.random() < 0.7:
            self.read(draw.choice(["ok", "ok", "ok", "lost", "failed"]), now_s)
        elif draw.random() < 0.7:
            self.spill(draw.randint(1, 4))
        else:
            self.look(now_s)

    # --- inside

    def _hear(self, events: list[TierEvent]) -> None:
        for tier, event in events:
            if tier == "host" and isinstance(event, ContentStored):
                self._check(event.content, self.tiers._host.resident.places[event.content.key])

    def _check(self, content: Content, slot: int) -> None:
        right = self._right(content)
        assert content.key in self.damaged or bytes(self._memory(slot)[: len(right)]) == right, (
            f"wrong bytes in slot {slot}"
        )

    def _memory(self, slot: int) -> memoryview:
        return self.slots.slot(slot)

    def validate(self) -> None:
        self.tickets.validate()

    def close(self) -> None:
        self.pool.close()
