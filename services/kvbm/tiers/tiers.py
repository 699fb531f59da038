"""Tiers: one layout's blocks in host memory and on disk; decides what is kept, evicted and moved between them. Pure.

    worker ── store ──▶ host slots ── spills: seen twice ──▶ disk records        (while records are free, all)
    worker ◀── fetch ── host slots ◀── reads: fetched ────── disk records        (the record stays)

It knows slots and records as integers, and no bytes, owners, deadlines or clocks; `tickets.py` adds which engine, and
until when. `host_slots.py` and `disk_records.py` draw the states of the two. A method returns what it decides. The
shell does it, and reports each `Read` and each `Spill` as done exactly once, however it ended.

Every change of what can be found is an event with its tier, in order; a block that leaves the host tier may still be on
disk. A request of n blocks takes O(n), and what the policies need to find victims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Literal

from services.kvbm.tiers.actions import (
    HeldPrefix,
    Offered,
    Read,
    ReadOutcome,
    Spill,
    TierEvent,
    TierSizes,
    TierStatistics,
)
from services.kvbm.tiers.disk_records import DiskRecords, FoundBlock, WriteOutcome
from services.kvbm.tiers.frequency import AccessFrequency
from services.kvbm.tiers.host_slots import HostSlots, SlotState
from services.kvbm.tiers.policies import EvictionPolicy
from shared.blocks import Content, ContentEvicted
from shared.hashing import KEY_BYTES, ContentKey


class Tiers:
    """The tiers of one layout. `quarantined` says that a former writer may still write to any slot; `free_slots` ends
    that."""

    def __init__(
        self, sizes: TierSizes, host_policy: EvictionPolicy, disk_policy: EvictionPolicy, *, quarantined: bool = False
    ) -> None:
        if sizes.slots < 1 or sizes.records < 0:
            raise ValueError(f"a store of {sizes.slots} slots and {sizes.records} records")
        self.sizes = sizes
        self._host = HostSlots(host_policy, sizes.slots, quarantined=quarantined)
        self._disk = DiskRecords(disk_policy, sizes.records)
        self._frequency = AccessFrequency(sizes.remembered or 4 * sizes.slots + sizes.records)
        self._spill_queue: OrderedDict[ContentKey, None] = OrderedDict()
        """Blocks in the host tier that are worth a record and not on disk, in the order in which they will be
        spilled."""
        self._reads: dict[int, Read] = {}
        """Reads under way, by slot."""
        self._spills: dict[int, Spill] = {}
        """Spills under way, by record: a slot may be spilled again after the disk was off and on."""
        self._erases: list[int] = []
        """Records that the disk must erase."""
        self._spare = min(sizes.spare_slots, sizes.slots // 8)
        self._held_limit = max(1, int(sizes.slots * sizes.held_share))

    # --- workers write

    def offer(self, contents: Sequence[Content], room: int, awaited: Container[ContentKey] = ()) -> Offered:
        """Grant slots, at most `room`, for those of the blocks that are new and worth one; a prefix comes first block
        first. A block that is `awaited` is worth one."""
        host = self._host
        seen = self._frequency.record([content.key for content in contents])
        # Record these uses first, so that no block is evicted for one that follows it.
        self._record_use([content.key for content in contents if content.key in host.resident])
        indices: list[int] = []
        slots: list[int] = []
        known = 0
        events: list[TierEvent] = []
        rare: list[int] = []
        for index, content in enumerate(contents):
            if host.knows(content.key):
                known += 1
                continue
            if seen[index] < self.sizes.host_sightings and content.key not in awaited:
                rare.append(index)
                continue
            if len(slots) == room:
                continue
            taken = host.grant(content)
            if taken is None:
                room = len(slots)
                continue
            slot, evicted = taken
            if evicted is not None:
                self._left_host(evicted, events)
            indices.append(index)
            slots.append(slot)
        return Offered(indices, slots, known, len(contents) - known - len(slots), events, rare)

    def publish(self, slots: Sequence[int]) -> list[TierEvent]:
        """Publish the blocks of these granted slots, which are written; a prefix comes first block first."""
        # The policy hears of a prefix from its end, so that a parent is never older than its child.
        stored = [self._host.publish(slot) for slot in reversed(slots)]
        events: list[TierEvent] = [("host", event) for event in reversed(stored) if event is not None]
        self._queue_spills([event.content.key for _, event in events])
        return self._set_backed(events)

    def free_slots(self, slots: Iterable[int]) -> None:
        """Free these granted or quarantined slots, whose writers have stopped; nothing is kept."""
        for slot in slots:
            self._host.free_slot(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Quarantine these granted slots, whose writers may still write after their time."""
        for slot in slots:
            self._host.quarantine(slot)

    # --- workers read

    def fetch(self, keys: Sequence[ContentKey], *, memory_only: bool = False) -> HeldPrefix:
        """Hold the longest prefix of `keys` that is in either tier, within the limit of held slots and the room for
        reads; with `memory_only` that can be read now. No two keys are equal."""
        slots, missing = self._hold_prefix(keys[: self.leading(keys)] if memory_only else keys)
        reads: list[Read] = []
        events: list[TierEvent] = []
        for index in missing:
            read = self._begin_read(keys[index], events)
            if read is None:
                self._host.release(slot for slot in slots[index:] if slot is not None)
                del slots[index:]
                break
            slots[index] = read.slot
            reads.append(read)
        prefix = [slot for slot in slots if slot is not None]
        loading = [index for index, slot in enumerate(prefix) if slot in self._reads] if self._reads else []
        found, skipped = keys[: len(prefix)], set(loading)
        self._frequency.record_later(found)
        self._record_use([key for index, key in enumerate(found) if index not in skipped] if skipped else found)
        self._disk.resident.record_use(read.content.key for read in reversed(reads))
        return HeldPrefix(prefix, loading, reads, events)

    def _hold_prefix(self, keys: Sequence[ContentKey]) -> tuple[list[int | None], list[int]]:
        """Hold the blocks in the host tier or on their way there, so that the reads for the others cannot evict them.
        Blocks on disk have None in their place, and their indices are in the second list. Abandoned reads count against
        the limit of reads, so that a hung disk cannot take every slot; blocks in memory can be held regardless of
        them."""
        host, on_disk = self._host, self._disk.resident.places
        there, coming = host.resident.places, host.loading
        slots: list[int | None] = []
        missing: list[int] = []
        for key in keys:
            slot = there.get(key)
            if slot is None:
                slot = coming.get(key)
            if host.held + len(missing) >= self._held_limit and (slot is None or not host.is_held(slot)):
                break
            if slot is not None:
                host.hold(slot)
            elif key in on_disk and host.held + host.abandoned + len(missing) < self._held_limit:
                missing.append(len(slots))
            else:
                break
            slots.append(slot)
        return slots, missing

    def _begin_read(self, key: ContentKey, events: list[TierEvent]) -> Read | None:
        """Start to read a block from disk, and hold its slot; None if the host tier has no room."""
        content = self._disk.resident.content(key)
        taken = self._host.load(content)
        if taken is None:
            return None
        slot, evicted = taken
        if evicted is not None:
            self._left_host(evicted, events)
        self._host.hold(slot)
        read = self._reads[slot] = Read(slot, self._disk.start_read(key), content)
        return read

    def release(self, slots: Iterable[int]) -> None:
        """Remove one hold from each of these slots: a fetch has stopped reading them."""
        self._host.release(slots)

    def leading(self, keys: Sequence[ContentKey]) -> int:
        """Return how many of these blocks, from the first on, are in host memory and can be read now."""
        there = self._host.resident.places
        return next((index for index, key in enumerate(keys) if key not in there), len(keys))

    def known(self, keys: Sequence[ContentKey]) -> int:
        """Return how many of these blocks, from the first on, are in either tier, or on their way to memory."""
        host, on_disk = self._host, self._disk.resident.places
        missing = (index for index, key in enumerate(keys) if not host.knows(key) and key not in on_disk)
        return next(missing, len(keys))

    def contents(self, keys: Sequence[ContentKey]) -> list[Content]:
        """Return the contents of blocks that are in host memory."""
        return [self._host.resident.content(key) for key in keys]

    def is_in_host(self, key: ContentKey) -> bool:
        """Return whether a block is in host memory, or on its way there."""
        return self._host.knows(key)

    def may_come(self, key: ContentKey) -> bool:
        """Return whether a block is in neither tier, nor on its way from disk: an engine may be writing it."""
        host, on_disk = self._host, self._disk.resident.places
        return key not in host.resident.places and key not in host.loading and key not in on_disk

    def is_loading(self, slot: int) -> bool:
        """Return whether a read of the disk fills the slot."""
        return slot in self._reads

    # --- wrong blocks

    def discard(self, keys: Sequence[ContentKey]) -> tuple[list[int], list[TierEvent]]:
        """Discard these blocks from both tiers: they cannot be found any more, and what is on its way will not be kept.
        Return the slots that had them, which readers may still hold, and the events."""
        slots: list[int] = []
        events: list[TierEvent] = []
        for key in reversed(keys):
            self._host.condemn(key)
            slot = self._host.resident.places.get(key)
            if slot is not None:
                slots.append(slot)
                self._left_host(self._host.discard(slot), events)
            lost = self._disk.discard(key)
            if lost is not None:
                record, evicted = lost
                self._erases.append(record)
                events.append(("disk", evicted))
        return slots, events

    def is_condemned(self, slot: int) -> bool:
        """Return whether the block that a read brings to the slot will not be kept."""
        return self._host.is_condemned(slot)

    def take_erases(self) -> list[int]:
        """Return the records to erase since the last call; report each with `erase_done`."""
        erases, self._erases = self._erases, []
        return erases

    def erase_done(self, record: int) -> None:
        """End an erasure, successful or not."""
        self._disk.erase_done(record)

    # --- the disk reports

    def read_done(self, read: Read, outcome: ReadOutcome) -> list[TierEvent]:
        """End a read. If it failed, the fetches that held its slot must have released it."""
        assert self._reads.pop(read.slot, None) == read, f"no such read: {read}"
        events: list[TierEvent] = []
        lost = self._disk.read_done(read.record, read.content.key, lost=outcome == "lost")
        if lost is not None:
            events.append(("disk", lost))
        stored = self._host.loaded(read.slot, ok=outcome == "ok")
        if stored is not None:
            events.append(("host", stored))
        return self._set_backed(events)

    def take_spills(self, most: int) -> tuple[list[Spill], list[TierEvent]]:
        """Return the spills to start now, at most `most`, and the events of blocks that were evicted from disk for
        them."""
        spills: list[Spill] = []
        events: list[TierEvent] = []
        while self._spill_queue and len(spills) < most:
            key = next(iter(self._spill_queue))
            if not self._is_worth_a_record(key):  # the disk has become full meanwhile
                del self._spill_queue[key]
                continue
            content = self._host.resident.content(key)
            written = self._disk.start_write(content)
            if written is None:
                break
            del self._spill_queue[key]
            record, evicted = written
            if evicted is not None:
                events.append(("disk", evicted))
            slot = self._host.resident.places[key]
            self._host.hold(slot)
            spill = self._spills[record] = Spill(slot, record, content)
            spills.append(spill)
        return spills, self._set_backed(events)

    def spill_done(self, spill: Spill, outcome: WriteOutcome) -> list[TierEvent]:
        """End a spill. A block whose spill failed is tried again when it is seen again."""
        assert self._spills.pop(spill.record, None) == spill, f"no such spill: {spill}"
        self._host.release((spill.slot,))
        stored = self._disk.write_done(spill.record, outcome)
        if self._disk.is_erasing(spill.record):
            self._erases.append(spill.record)
        return [] if stored is None else self._set_backed([("disk", stored)])

    def retry_space(self) -> None:
        """Try a disk again that had no space for a spill."""
        self._disk.retry_space()

    def disk_failed(self) -> list[TierEvent]:
        """Record that the disk is off; what is under way must still be reported."""
        self._spill_queue.clear()
        return self._set_backed([("disk", event) for event in self._disk.turn_off()])

    def disk_ready(self, found: Sequence[FoundBlock]) -> list[TierEvent]:
        """Record that the disk is on, with these blocks, oldest first; also at the start."""
        events: list[TierEvent] = [("disk", event) for event in self._disk.turn_on(found)]
        self._queue_spills(self._host.resident.places)
        return self._set_backed(events)

    def prepare(self) -> list[TierEvent]:
        """Do after a reply what need not wait until the next request: count sightings, report uses to the policies, and
        free a few slots ahead of need. With it 64 new blocks are granted slots in 70 µs, without it in 200 to 400
        µs."""
        self._frequency.flush()
        self._host.resident.flush_uses()
        self._disk.resident.flush_uses()
        events: list[TierEvent] = []
        while self._host.free < self._spare:
            evicted = self._host.evict_one()
            if evicted is None:
                break
            self._left_host(evicted, events)
        return events

    # --- inside

    def _record_use(self, keys: Sequence[ContentKey]) -> None:
        """Record that these blocks of the host tier were asked for; a prefix comes first block first."""
        self._host.resident.record_use(reversed(keys))
        self._queue_spills(keys)

    def _queue_spills(self, keys: Collection[ContentKey]) -> None:
        """Queue those of these blocks, all in the host tier, that are worth a record and not on disk."""
        disk = self._disk
        if not disk.on:
            return
        for key in keys:
            if key not in disk.resident.places and key not in disk.writing and self._is_worth_a_record(key):
                self._spill_queue[key] = None

    def _is_worth_a_record(self, key: ContentKey) -> bool:
        """Return whether the block was seen often enough, or needs no other block's record."""
        sizes = self.sizes
        return self._frequency.count(key) >= sizes.disk_sightings or (sizes.fill_disk and self._disk.free > 0)

    def _set_backed(self, events: list[TierEvent]) -> list[TierEvent]:
        """Report to the host tier's policy which of these blocks are on disk too. Return the events."""
        host, on_disk = self._host.resident, self._disk.resident.places
        for _tier, event in events:
            key = event.content.key
            if key in host:
                host.set_backed(key, key in on_disk)
        return events

    def _left_host(self, evicted: ContentEvicted, events: list[TierEvent]) -> None:
        self._spill_queue.pop(evicted.content.key, None)
        events.append(("host", evicted))

    # --- questions

    def state(self, slot: int) -> SlotState:
        """Return the slot's state, as `host_slots.py` draws it."""
        return self._host.state(slot)

    def places(self, key_end: bytes) -> list[str]:
        """Return where a block is, by the end of its key, and why it stays or goes. O(blocks)."""
        host, disk = self._host, self._disk
        known = (host.writing, host.loading, host.resident.places, disk.writing, disk.resident.places)
        meant = (key for keys in known for key in keys if key.endswith(key_end))
        key = next(meant, key_end if len(key_end) == KEY_BYTES else None)
        if key is None:
            return ["in no tier"]
        places = [self._host_place(key), self._disk_place(key)]
        seen = self._frequency.count(key)
        return [*filter(None, places), f"offered or asked for {seen} times"]

    def _host_place(self, key: ContentKey) -> str:
        host = self._host
        if key in host.writing:
            return "an engine is writing it to host memory"
        if key in host.loading:
            return "on its way from disk to host memory"
        slot = host.resident.places.get(key)
        if slot is None:
            return "not in host memory"
        spill = "; it waits to be written to disk" if key in self._spill_queue else ""
        if host.is_held(slot):
            return f"in host memory, and stays while it is read{spill}"
        return f"in host memory, until the policy gives its place to another block{spill}"

    def _disk_place(self, key: ContentKey) -> str:
        disk = self._disk
        if not disk.capacity:
            return ""
        if not disk.on:
            return "not on disk: the disk is off"
        if key in disk.writing:
            return "being written to disk"
        if key in disk.resident.places:
            return "on disk, until the policy gives its place to another block"
        return f"not on disk: {disk.free} records are free, and else {self.sizes.disk_sightings} sightings earn one"

    def snapshot(self, tier: Literal["host", "disk"]) -> list[Content]:
        """Return the blocks that can be found in a tier, each after its parent if that is there."""
        return (self._host if tier == "host" else self._disk).resident.snapshot()

    def digest(self, tier: Literal["host", "disk"]) -> int:
        """Return the XOR of the event hashes of the blocks that can be found in a tier."""
        return (self._host if tier == "host" else self._disk).resident.digest

    def statistics(self) -> TierStatistics:
        """Return counts by state, in O(1)."""
        return TierStatistics(self._host.statistics(), self._disk.statistics(), len(self._spill_queue))

    def validate(self, fetched: Iterable[int]) -> None:
        """Raise AssertionError if the tiers contradict themselves, or the slots that fetches hold (a slot for each
        hold). O(slots + records)."""
        holds: dict[int, int] = {}
        for slot in [*fetched, *(spill.slot for spill in self._spills.values())]:
            holds[slot] = holds.get(slot, 0) + 1
        self._host.validate(holds)
        self._disk.validate()
        self._frequency.validate()
        assert self._host.loading == {read.content.key: slot for slot, read in self._reads.items()}, "a read is lost"
        for spill in self._spills.values():
            slot = spill.slot
            state = self._host.state(slot)
            assert state in ("ready", "leaving"), f"slot {slot} is {state} and spilled"
            there = self._host.resident.places.get(spill.content.key) == slot
            assert there or state == "leaving", f"slot {slot} holds another block than is spilled"
        for key in self._spill_queue:
            assert key in self._host.resident, f"{key.hex()} waits for the disk and is not there"
            assert key not in self._disk.resident, f"{key.hex()} waits for the disk and is there"
        assert not (self._spill_queue and not self._disk.on), "blocks wait for a disk that is off"
