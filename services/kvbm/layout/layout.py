"""One layout's block store: carries out what its `Tickets` and `Tiers` decide, and answers engines and routers.

    first attach ──▶ open ──its arena goes to another layout, or kvbm ends──▶ stopped ──nothing is under way──▶ closed

    request ──▶ Tickets ──▶ reply;  reads ──▶ DiskTraffic;  changes ──▶ EventLog

    settle, after each reply and each end of a read or spill:
        free a few slots ahead of need, start spills, report progress to pending fetches, publish changes to routers

The generation of a slot that is granted or read into grows before any process hears of the slot. Requests raise the
errors of `errors.py`; they have changed nothing then, except as `TicketExpired` says.

docs/decisions/0027 gives the reasons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from services.kvbm.config import KvbmConfig
from services.kvbm.disk.disk import Disk
from services.kvbm.disk.format import DiskGeometry
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.layout.describe import LayoutFacts, LayoutNotes
from services.kvbm.layout.disk_traffic import SPILLS_MOST, DiskTraffic
from services.kvbm.layout.event_log import EventLog
from services.kvbm.metrics import EvictionReason, StoreMetrics
from services.kvbm.tickets.packing import (
    SlotChecksums,
    pack_slots,
    to_contents,
    unpack_checksums,
    unpack_keys,
    unpack_slots,
)
from services.kvbm.tickets.pending_fetches import PendingFetches, SendFetchReply
from services.kvbm.tickets.results import ExpiredTicket
from services.kvbm.tickets.tickets import Tickets
from services.kvbm.tiers import policies
from services.kvbm.tiers.actions import Offered, Read, ReadOutcome, Spill, TierEvent
from services.kvbm.tiers.disk_records import FoundBlock, WriteOutcome
from services.kvbm.tiers.hit_window import HitWindow, LookupCounts
from services.kvbm.tiers.tiers import Tiers
from shared.blocks import Content
from shared.hashing import KEY_BYTES, ContentKey
from shared.messages import kvbm as wire
from shared.messages.control import Note
from shared.messages.kv_events import Tier
from shared.pool.map import ArenaMap
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime


class LentBlock(Struct, frozen=True):
    """A block that a peer may read, held in its slot."""

    slot: int
    content: Content
    checksum: int
    """XXH3-64 of its bytes. 0 if not known."""


_TICKET_BITS = 48
"""Ticket ids begin with a random number of this many bits, so that no ticket of another kvbm is mistaken for one of
ours."""


class LayoutStore:
    """The store of one layout. `former_owners` are the engines that a former kvbm may have let write to these slots.
    The caller runs the disk; it calls `close` after the last disk request has ended."""

    def __init__(
        self,
        layout: wire.StoreLayout,
        slots: ArenaMap,
        config: KvbmConfig,
        runtime: Runtime,
        metrics: StoreMetrics,
        *,
        former_owners: Collection[str],
        disk: tuple[DiskGeometry, DiskThreads] | None,
    ) -> None:
        self.layout = layout
        self.digest = layout.digest
        self.slots = slots
        self.disk: Disk | None = None
        if disk is not None:
            self.disk = Disk(
                *(Path(config.disk.directory), *disk, self._disk_ready, self._disk_failed),
                min_free_bytes=config.disk.min_free_bytes,
                retry_s=config.disk.retry_s,
            )
        self._now = asyncio.get_running_loop().time
        self._block_size = layout.kv.block_size
        self._block_bytes = layout.kv.block_bytes
        self._metrics = metrics
        sizes = config.tiers.sizes(slots.arena.slots, 0 if self.disk is None else self.disk.geometry.capacity)
        self._policies: dict[Tier, policies.EvictionPolicy] = {
            "host": policies.make_policy(config.tiers.host_policy, sizes.slots),
            "disk": policies.make_policy(config.tiers.disk_policy, max(1, sizes.records)),
        }
        self.tiers = Tiers(sizes, self._policies["host"], self._policies["disk"], quarantined=bool(former_owners))
        first_ticket = 1 + runtime.draw.getrandbits(_TICKET_BITS)
        self.tickets = Tickets(self.tiers, config.tickets, former_owners=former_owners, first_ticket=first_ticket)
        self.log = EventLog(runtime.events.open_publisher(), self._block_size, self._digests, runtime.wall)
        self._checksums = SlotChecksums(slots.arena.slots)
        self._window = HitWindow(config.statistics.window_s)
        self._traffic = DiskTraffic(
            *(self.disk, slots, self._checksums, max(1, min(SPILLS_MOST, config.disk.queue // config.pool.arenas))),
            read_done=self._read_done,
            spill_done=self._spill_done,
            erased=self._erased,
            metrics=metrics,
        )
        self._pending = PendingFetches(slots.generations, self._checksums)
        self.notes = LayoutNotes()
        self._limited_log = RateLimitedLog()
        self._settling: asyncio.Handle | None = None
        self._ended = False

    @property
    def in_use(self) -> bool:
        """Whether the arena must stay, because a living engine is attached or slots are being copied."""
        return self.tickets.statistics().owners > 0 or self._traffic.under_way > 0

    @property
    def ended(self) -> bool:
        """Whether the store is stopped: its slots may be another layout's."""
        return self._ended

    # --- owners

    def attach(self, owner: str) -> None:
        """Attach the engine, which ends all it had under way: tickets, and fetches that wait for the disk."""
        self.tickets.attach(owner)
        self._pending.refuse_all(owner, "the engine has attached again")
        self.settle_soon()

    def owner_dead(self, owner: str) -> None:
        """End all of an engine whose lock is free: tickets, and fetches that wait for the disk."""
        self.tickets.owner_dead(owner)
        self._pending.refuse_all(owner, "the engine is dead")
        self.settle_soon()

    def worker_lease_lost(self, owner: str) -> list[ExpiredTicket]:
        """Expire the open tickets of an engine whose worker has lost its lease."""
        return self._expired(self.tickets.worker_lease_lost(owner))

    def expire(self) -> list[ExpiredTicket]:
        """Expire the tickets whose deadline has come."""
        return self._expired(self.tickets.expire(self._now()))

    def _expired(self, expired: list[ExpiredTicket]) -> list[ExpiredTicket]:
        self._metrics.count_expired(expired)
        for ticket in expired:
            self._pending.refuse(ticket.ticket, "expired", "its time is over")
        return expired

    # --- requests

    def store(self, ask: wire.Store) -> wire.Granted:
        """Grant slots to write to."""
        self.tickets.check_block_count(len(ask.blocks))
        contents = to_contents(ask.blocks, self._block_size)
        granted = self._grant(ask.owner, contents)
        self._metrics.count_offer(len(granted.slots), granted.known, granted.declined)
        if granted.declined:
            self._note_declined(contents, granted)
        time_left_s = self.tickets.limits.store_time_s
        return wire.Granted(granted.ticket, time_left_s, granted.indices, pack_slots(granted.slots))

    def _grant(self, owner: str, contents: Sequence[Content]) -> Offered:
        granted = self.tickets.store(owner, contents, self._now())
        for slot in granted.slots:
            self.slots.grant(slot)
        self._checksums.clear(granted.slots)
        self._changed(granted.events)
        return granted

    def _note_declined(self, contents: Sequence[Content], offered: Offered) -> None:
        now_s = self._now()
        few = f"it was seen fewer than {self.tiers.sizes.host_sightings} times"
        self.notes.declined(contents, offered.rare, few, now_s)
        if len(offered.rare) < offered.declined:
            settled = {*offered.indices, *offered.rare}
            full = [
                index
                for index, content in enumerate(contents)
                if index not in settled and not self.tiers.is_in_host(content.key)
            ]
            self.notes.declined(contents, full, "no slot may be written or evicted for it now", now_s)

    def commit(self, ask: wire.Commit) -> wire.Settled:
        """Publish the blocks of these slots: they can be found from now on."""
        slots = unpack_slots(ask.slots)
        written = dict(zip(slots, unpack_checksums(ask.checksums, len(slots)), strict=True))
        self._publish(ask.owner, ask.ticket, written)
        self._metrics.count_commit(len(written), self._block_bytes)
        return wire.Settled()

    def _publish(self, owner: str, ticket: int, written: Mapping[int, int]) -> None:
        """Publish slots, each with its checksum."""
        events = self.tickets.commit(owner, ticket, written.keys(), self._now())
        for slot, checksum in written.items():  # a slot that was freed after all is granted again before it is read
            self._checksums.set(slot, checksum)
        self._changed(events)
        if not self._ended:
            self._pending.add_progress(self.tickets.hold_awaited(events, self._now()))

    def abort(self, ask: wire.Abort) -> wire.Settled:
        """End a store ticket; nothing is published."""
        self.tickets.abort(ask.owner, ask.ticket)
        return wire.Settled()

    def fetch(self, ask: wire.Fetch, send_later: SendFetchReply) -> tuple[wire.Fetched, bool]:
        """Hold the longest prefix. Return the first reply, with what is in memory, and whether it is the only one; if
        not, `send_later` sends what comes from disk, and what is committed while the fetch awaits it."""
        self.tickets.check_block_count(len(ask.keys) // KEY_BYTES)
        keys = unpack_keys(ask.keys)
        held = self.tickets.fetch(ask.owner, keys, self._now(), awaits=ask.awaits)
        from_disk = len(held.loading)
        asked = len(keys) - held.awaited
        found = LookupCounts(1, asked, host=len(held.slots) - from_disk, disk=from_disk)
        self._window.add(found, self._now())
        self._metrics.count_lookup(found, self._block_bytes)
        self._changed(held.events)
        self._traffic.read(held.reads)
        length = len(held.slots) + held.awaited
        complete = held.ready == length
        if not complete:
            self._pending.add(held.ticket, ask.owner, send_later)
        time_left_s, ready = self.tickets.limits.fetch_time_s, held.slots[: held.ready]
        return self._pending.reply(held.ticket, time_left_s, 0, ready, length, disk=False), complete

    def release(self, ask: wire.Release) -> wire.Settled:
        """End a fetch ticket: its slots are no longer held."""
        self.tickets.release(ask.owner, ask.ticket)
        self._pending.refuse(ask.ticket, "unknown_ticket", "it was released", owner=ask.owner)
        return wire.Settled()

    def discard(self, ask: wire.Discard) -> wire.Settled:
        """Discard blocks that may be wrong. An engine that is loading one sees by the generation that its copy is
        worthless."""
        self.tickets.check_block_count(len(ask.keys) // KEY_BYTES)
        slots, events = self.tickets.discard(ask.owner, unpack_keys(ask.keys))
        if slots or events:
            named = len(ask.keys) // KEY_BYTES
            self._limited_log.warn(
                f"layout {self.digest}: blocks are discarded",
                f"engine {ask.owner} named {named} blocks that may be wrong, {len(slots)} of them were in memory",
            )
        self._discarded(slots, events, "discarded")
        return wire.Settled()

    # --- other machines' kvbms

    def leading(self, keys: Sequence[ContentKey]) -> int:
        """Return how many of these blocks, from the first on, are in memory."""
        return self.tiers.leading(keys)

    def lend(self, owner: str, keys: Sequence[ContentKey]) -> list[LentBlock]:
        """Hold what is in memory of the prefix, until `owner_dead`. The owner has attached."""
        held = self.tickets.lend(owner, keys, self._now())
        contents = self.tiers.contents(keys[: len(held.slots)])
        self.settle_soon()
        return [
            LentBlock(slot, content, self._checksums.get(slot))
            for slot, content in zip(held.slots, contents, strict=True)
        ]

    def record_checksums(self, summed: Mapping[int, int]) -> None:
        """Record the checksums of slots that are lent."""
        for slot, checksum in summed.items():
            self._checksums.set(slot, checksum)

    def reserve(self, owner: str, blocks: Sequence[wire.StoreBlock]) -> Offered:
        """Grant slots for blocks that are read from a peer: as for an engine's store."""
        granted = self._grant(owner, to_contents(blocks, self._block_size))
        self.settle_soon()
        return granted

    def publish(self, owner: str, ticket: int, written: Mapping[int, int]) -> None:
        """Publish reserved slots that were read whole, each with its checksum; the others are free. Raise
        TicketExpired."""
        self._publish(owner, ticket, written)
        self.settle_soon()

    def _discarded(self, slots: Collection[int], events: list[TierEvent], why: EvictionReason) -> None:
        for slot in slots:
            self.slots.grant(slot)
        self._changed(events, why)
        self._erase()

    def _erase(self) -> None:
        """Erase the records of discarded blocks, so that no restart finds them."""
        self._traffic.erase(self.tiers.take_erases())

    # --- the disk

    def _disk_ready(self, found: list[FoundBlock]) -> None:
        self._changed(self.tiers.disk_ready(found))
        self.settle_soon()

    def _disk_failed(self, _reason: str) -> None:
        self._changed(self.tiers.disk_failed(), "disk gone")
        self.settle_soon()

    def _read_done(self, read: Read, outcome: ReadOutcome) -> None:
        advanced, events = self.tickets.read_done(read, outcome, self._now())
        self._changed(events, "lost")
        if not self._ended:
            self._pending.add_progress(advanced)
        self.settle_soon()

    def _spill_done(self, spill: Spill, outcome: WriteOutcome) -> None:
        self._changed(self.tiers.spill_done(spill, outcome))
        if outcome == "damaged":  # or engines that compare no checksums would read it
            self._discarded(*self.tiers.discard([spill.content.key]), "lost")
        self._erase()
        self.settle_soon()

    def _erased(self, record: int) -> None:
        self.tiers.erase_done(record)
        self.settle_soon()

    def retry_space(self) -> None:
        """Try a full disk again."""
        self.tiers.retry_space()
        self.settle_soon()

    # --- settling

    def _changed(self, events: list[TierEvent], why: EvictionReason = "room") -> None:
        if events:
            self._metrics.count_evictions(events, why)
            self.notes.changed(events, why, self._now())
            self.log.add(events)

    def settle_soon(self) -> None:
        """Call `settle` in the loop's next turn, when a reply is on its way."""
        if self._settling is None and not self._ended:
            self._settling = asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        """Do what may be done after a reply instead of before the next one, as drawn above."""
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        self._changed(self.tiers.prepare())
        if self._traffic.room:
            spills, events = self.tiers.take_spills(self._traffic.room)
            self._changed(events)
            self._traffic.spill(spills)
        self._pending.send_progress()
        if self.log.flush():
            self.settle_soon()

    def stop(self) -> None:
        """Start nothing new, and refuse the fetches that wait. What is under way ends by itself."""
        self._ended = True
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        self._pending.refuse_all(None, "the layout is gone")

    def close(self) -> None:
        """Close a store that is stopped and has nothing under way."""
        assert self._ended, "more may be begun"
        assert not self._traffic.under_way, "a copy is under way"
        self.log.close()

    # --- questions

    def facts(self) -> LayoutFacts:
        """Return the facts that people see."""
        return LayoutFacts(
            layout=self.layout,
            digest=self.digest,
            tickets=self.tickets.statistics(),
            disk=None if self.disk is None else self.disk.statistics(),
            found=self._window.total(self._now()),
            problems={tier: self._problem(tier) for tier in self._policies},
        )

    def _problem(self, tier: Tier) -> str:
        problem = getattr(self._policies[tier], "problem", "")
        return f"its policy is off: {problem}" if problem else ""

    def report(self) -> wire.LayoutReport:
        """Return how far the events are, for the load report."""
        mark = self.log.mark
        return wire.LayoutReport(self.digest, mark.sequence, mark.host_digest, mark.disk_digest)

    def snapshot(self) -> tuple[int, list[tuple[Tier, list[Content]]]]:
        """Return everything that can be found, by tier, and the sequence of the events up to it."""
        mark = self.log.flush_all()
        return mark.sequence, [("host", self.tiers.snapshot("host")), ("disk", self.tiers.snapshot("disk"))]

    def explain_block(self, key_end: bytes) -> tuple[list[str], list[Note]]:
        """Return where a block is, by the end of its key, and what happened to it."""
        return self.tiers.places(key_end), self.notes.find(key_end, self._now())

    def _digests(self) -> tuple[int, int]:
        return self.tiers.digest("host"), self.tiers.digest("disk")

    def validate(self) -> None:
        """Raise AssertionError if the store contradicts itself. O(slots + records)."""
        self.tickets.validate()
        self.log.validate()
        self._window.validate()
        statistics = self.tickets.statistics()
        self._pending.validate()
        waiting = len(self._pending) - len(self._pending.with_progress)
        assert waiting <= statistics.fetches, "a fetch has ended and its engine gets no reply"
        assert self._traffic.under_way == statistics.tiers.host.loading + statistics.tiers.disk.writing, (
            "a copy is counted wrong"
        )
        assert self._settling is not None or not (self._pending.with_progress or self.log.waiting), (
            "no turn will report it"
        )
