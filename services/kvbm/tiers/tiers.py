"""Tiers: one layout's blocks in host memory and on disk; what is kept, what goes, what moves between the two. Pure.

    worker ── store ──▶ host slots ── spills: seen twice ──▶ disk records        (while records are free, all)
    worker ◀── fetch ── host slots ◀── reads: fetched ────── disk records        (the record stays)

It knows slots and records as integers, no bytes, no owner, no deadline, no clock; `tickets.py` adds who and how long.
`host_slots.py` and `disk_records.py` draw the states of the two. What a method decides it returns: the shell does it,
and reports each `Read` and each `Spill` as done exactly once, however it went.

Every change of what can be found is an event with its tier, in order; a block that leaves the host tier may still be on
disk. A request of n blocks takes O(n) and what the policies need for their victims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
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
from services.kvbm.tiers.disk_records import DiskRecords, WriteOutcome
from services.kvbm.tiers.disk_results import FoundBlock
from services.kvbm.tiers.frequency import AccessFrequency
from services.kvbm.tiers.host_slots import HostSlots, SlotState
from services.kvbm.tiers.policies import EvictionPolicy
from shared.blocks import Content, Evicted
from shared.hashing import ContentKey


class Tiers:
    """See the module. `quarantined`: a slot may still be written to by somebody from before; `give_back` ends that."""

    def __init__(
        self, sizes: TierSizes, host_policy: EvictionPolicy, disk_policy: EvictionPolicy, *, quarantined: bool = False
    ) -> None:
        if sizes.slots < 1 or sizes.records < 0:
            raise ValueError(f"a store of {sizes.slots} slots and {sizes.records} records")
        self.sizes = sizes
        self._host = HostSlots(host_policy, sizes.slots, quarantined=quarantined, leaves_first=sizes.leaves_first)
        self._disk = DiskRecords(disk_policy, sizes.records, leaves_first=sizes.leaves_first)
        self._frequency = AccessFrequency(sizes.remembered or 4 * sizes.slots + sizes.records)
        self._spill_queue: OrderedDict[ContentKey, None] = OrderedDict()
        """In the host tier, worth a record, and not on disk: to be spilled, in this order."""
        self._reads: dict[int, Read] = {}
        """Under way, by slot."""
        self._spills: dict[int, Spill] = {}
        """Under way, by record: a slot may be spilled again once the disk went and came back."""
        self._erases: list[int] = []
        """Records that the disk is to erase."""
        self._spare = min(sizes.spare_slots, sizes.slots // 8)
        self._held_limit = max(1, int(sizes.slots * sizes.held_share))

    # --- workers write

    def offer(self, contents: Sequence[Content], room: int) -> Offered:
        """Slots, at most `room`, for those of the blocks that are new and worth it; a prefix first block first."""
        host = self._host
        seen = self._frequency.record([content.key for content in contents])
        # First of all, so that no block goes for one that follows it.
        self._record_use([content.key for content in contents if content.key in host.resident])
        indices: list[int] = []
        slots: list[int] = []
        known = 0
        events: list[TierEvent] = []
        for index, content in enumerate(contents):
            if host.knows(content.key):
                known += 1
                continue
            if len(slots) == room or seen[index] < self.sizes.host_sightings:
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
        return Offered(indices, slots, known, len(contents) - known - len(slots), events)

    def publish(self, slots: Sequence[int]) -> list[TierEvent]:
        """These granted slots are written; a prefix first block first."""
        # The policy hears of a prefix from its end, so that a parent is never older than its child.
        stored = [self._host.publish(slot) for slot in reversed(slots)]
        events: list[TierEvent] = [("host", event) for event in reversed(stored) if event is not None]
        self._queue_spills([event.content.key for _, event in events])
        return self._set_backed(events)

    def free_slots(self, slots: Iterable[int]) -> None:
        """The writers of these granted or quarantined slots are done, and nothing is to be kept."""
        for slot in slots:
            self._host.free_slot(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """The writers of these granted slots are out of time, and may still write."""
        for slot in slots:
            self._host.quarantine(slot)

    # --- workers read

    def fetch(self, keys: Sequence[ContentKey]) -> HeldPrefix:
        """Holds the longest prefix of `keys`, no two of them equal, that is in either tier, as far as the bound of held
        slots and the room for what must be read allow."""
        slots, missing = self._hold_prefix(keys)
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
        """Holds what is in the host tier or on its way there, so that it does not go for what must be read: None in its
        place, and its index in the second list. Reads that nobody waits for any more count for what may be read, lest a
        disk that hangs takes slot after slot; what is in memory can be held beside them."""
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
        """Promotes a block that is on disk, and holds it; None: the host tier has no room for it."""
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
        """One fetch does not read these slots any more."""
        self._host.release(slots)

    def is_loading(self, slot: int) -> bool:
        """Whether a read of the disk fills the slot."""
        return slot in self._reads

    # --- wrong blocks

    def discard(self, keys: Sequence[ContentKey]) -> tuple[list[int], list[TierEvent]]:
        """These blocks cannot be found any more, in either tier, and what is on its way will not be. Returns the slots
        that had them, which their readers may still hold."""
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
        """Whether what a read of the disk brings to the slot is not to be kept."""
        return self._host.is_condemned(slot)

    def take_erases(self) -> list[int]:
        """The records to erase, new since the last call; each is to be told as `erased`."""
        erases, self._erases = self._erases, []
        return erases

    def erase_done(self, record: int) -> None:
        """The record has no block any more, or could not be written."""
        self._disk.erase_done(record)

    # --- the disk reports

    def read_done(self, read: Read, outcome: ReadOutcome) -> list[TierEvent]:
        """A read has ended. Where it failed the fetches that held its slot have released it before."""
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
        """What to write to disk now, at most `most` blocks, and who had to go for them."""
        spills: list[Spill] = []
        events: list[TierEvent] = []
        while self._spill_queue and len(spills) < most:
            key = next(iter(self._spill_queue))
            if not self._is_worth_a_record(key):  # the disk has filled up meanwhile
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
        """A spill has ended. Where it failed the block is tried again when it is seen again."""
        assert self._spills.pop(spill.record, None) == spill, f"no such spill: {spill}"
        self._host.release((spill.slot,))
        stored = self._disk.write_done(spill.record, outcome)
        if self._disk.is_erasing(spill.record):
            self._erases.append(spill.record)
        return [] if stored is None else self._set_backed([("disk", stored)])

    def retry_space(self) -> None:
        """Some time has passed since the disk had no space for a spill: it may be tried again."""
        self._disk.retry_space()

    def disk_failed(self) -> list[TierEvent]:
        """The disk is off; what is under way is still to be reported."""
        self._spill_queue.clear()
        return self._set_backed([("disk", event) for event in self._disk.turn_off()])

    def disk_ready(self, found: Sequence[FoundBlock]) -> list[TierEvent]:
        """The disk is on, with these blocks, oldest first. So it begins, too."""
        events: list[TierEvent] = [("disk", event) for event in self._disk.turn_on(found)]
        self._queue_spills(self._host.resident.places)
        return self._set_backed(events)

    def prepare(self) -> list[TierEvent]:
        """What may be done after an answer instead of before the next: what was seen is counted, policies hear of what
        was used, and a few slots are freed ahead of need. 64 new blocks are offered slots in 70 µs then, else in 200 to
        400."""
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
        """These, in the host tier, were asked for; a prefix first block first."""
        self._host.resident.record_use(reversed(keys))
        self._queue_spills(keys)

    def _queue_spills(self, keys: Collection[ContentKey]) -> None:
        """Those of `keys`, all in the host tier, that are worth it wait for the disk, if it has them not."""
        disk = self._disk
        if not disk.on:
            return
        for key in keys:
            if key not in disk.resident.places and key not in disk.writing and self._is_worth_a_record(key):
                self._spill_queue[key] = None

    def _is_worth_a_record(self, key: ContentKey) -> bool:
        """Seen often enough; or it takes nobody's place."""
        sizes = self.sizes
        return self._frequency.count(key) >= sizes.disk_sightings or (sizes.fill_disk and self._disk.free > 0)

    def _set_backed(self, events: list[TierEvent]) -> list[TierEvent]:
        """The host's policy hears which of these blocks are on disk too. Returns the events."""
        host, on_disk = self._host.resident, self._disk.resident.places
        for _tier, event in events:
            key = event.content.key
            if key in host:
                host.set_backed(key, key in on_disk)
        return events

    def _left_host(self, evicted: Evicted, events: list[TierEvent]) -> None:
        self._spill_queue.pop(evicted.content.key, None)
        events.append(("host", evicted))

    # --- questions

    def state(self, slot: int) -> SlotState:
        """As `host_slots.py` draws them."""
        return self._host.state(slot)

    def snapshot(self, tier: Literal["host", "disk"]) -> list[Content]:
        """What can be found in a tier, each block after its parent where the parent is there."""
        return (self._host if tier == "host" else self._disk).resident.snapshot()

    def digest(self, tier: Literal["host", "disk"]) -> int:
        """XOR of the event hashes of what can be found in a tier."""
        return (self._host if tier == "host" else self._disk).resident.digest

    def statistics(self) -> TierStatistics:
        """Counts by state, in O(1)."""
        return TierStatistics(self._host.statistics(), self._disk.statistics(), len(self._spill_queue))

    def validate(self, fetched: Iterable[int]) -> None:
        """Raises AssertionError where the tiers contradict themselves, or the slots that fetches hold (a slot for each
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
