"""DiskRecords: the records of one layout's disk tier, and which block each of them has. Pure.

    off ──turn_on(found)──▶ on ──turn_off──▶ off          `found`: the blocks that are on the disk already

          start_write          write_done              start_read
    free ───────────▶ writing ────────────────▶ ready ◀──────────▶ ready, being read
     ▲                   │ it failed              │      read_done
     └───────────────────┴────────────────────────┘ the policy's victim (not while it is read); lost; turned off
     ▲                   │ discarded meanwhile    │ discard
     └─ erase_done ── erasing ◀───────────────────┘

A record whose block may be wrong is not used again before the disk has tried to erase it. If the disk cannot, or is off
by then, a later start finds the block again; the next sequence that fails with it has it discarded again.

When the disk has no space for new records, the free ones are withheld, and blocks are evicted for others. When it has
no space even for those, nothing is written. Both last until `retry_space`, or until the disk was off and on again.

A request that is under way when the disk fails ends like any other. The disk that comes up later need not be the same
one. Until the request has ended its record is neither found nor used again, and a write from before `turn_off`
publishes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from services.kvbm.tiers.policies import EvictionPolicy
from services.kvbm.tiers.residency import Residency
from shared.blocks import Content, ContentEvicted, ContentStored
from shared.hashing import ContentKey

WriteOutcome = Literal["ok", "failed", "no space", "damaged"]
"""How a write ended. damaged: the memory to be written did not hold the block's bytes."""
HeaderProblem = Literal["blank", "torn", "version", "layout"]
"""Why a page is not a record of this layout. blank: it was never written. torn: its checksum or its lengths are wrong.
version: it has another format version. layout: it has another layout or payload size."""
LossReason = Literal["off", "busy", "no space", "error", "too large", "missing", "other key", "damaged"] | HeaderProblem
"""Why a block was not written or not read.

    off, busy               not tried: the tier is off; the limit of requests is under way
    no space, error         the disk refused
    too large               the block's tokens do not fit the header
    missing                 the file ends before the record does
    blank … layout          the header is not a record of this layout (`HeaderProblem`)
    other key, damaged      the record holds another block; the payload, or the memory to write, is not what was written
"""


class WrittenToDisk(Struct, frozen=True):
    """The record holds the block."""

    took_s: float
    """Seconds in the thread, for checksum and disk, without the queue."""


class LoadedFromDisk(Struct, frozen=True):
    """The memory holds the block, and its checksum was right."""

    content: Content
    took_s: float
    checksum: int = 0
    """The payload's checksum, as its header has it."""


class DiskFailure(Struct, frozen=True):
    """The request was not done; `detail` is for people."""

    reason: LossReason
    detail: str

    @property
    def tried(self) -> bool:
        """Whether the disk was tried. If not, the record is as it was; if so, the record's former block is to be
        forgotten."""
        return self.reason not in ("off", "busy")


class FoundBlock(Struct, frozen=True, gc=False):
    """A block that was on the disk when the tier came up. Its payload is checked when it is read."""

    record: int
    content: Content


class DiskStatistics(Struct, frozen=True):
    """The state of the disk tier."""

    state: Literal["off", "scanning", "on"]
    reason: str
    """Why the tier is off, or why it does not grow; empty if all is well."""


class RecordStatistics(Struct, frozen=True):
    """Counts of records by state; while the disk is on they add up to the capacity."""

    capacity: int
    on: bool
    free: int
    withheld: int
    """Free records that are not used, as the disk has no space."""
    writing: int
    ready: int
    reading: int
    """Records that are being read. Most are ready too; a record that was lost while it was read is not."""
    erasing: int = 0


class _Write(Struct):
    content: Content
    replaces: bool
    """Whether the record had another block before."""
    stray: bool = False
    """Whether the write started before the disk failed."""
    condemned: bool = False
    """Whether the block is not to be kept."""


class DiskRecords:
    """The records of one disk tier, 0 … capacity - 1. A capacity of 0 is a machine without a disk tier."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.capacity = capacity
        self.resident = Residency(policy, lambda record: record not in self._reading)
        self.on = False
        self.writing: dict[ContentKey, int] = {}
        """Blocks that are being written, and their records, without the stray ones; for reading only."""
        self._free: list[int] = []
        self._withheld: list[int] = []
        self._refuses = False
        """Whether the disk had no space even for a record that was written before."""
        self._writes: dict[int, _Write] = {}
        self._reading: set[int] = set()
        self._erasing: set[int] = set()

    def statistics(self) -> RecordStatistics:
        """Return counts by state, in O(1)."""
        return RecordStatistics(
            capacity=self.capacity,
            on=self.on,
            free=len(self._free),
            withheld=len(self._withheld),
            writing=len(self._writes),
            ready=len(self.resident),
            reading=len(self._reading),
            erasing=len(self._erasing),
        )

    @property
    def free(self) -> int:
        """The number of records that can be written before a block must be evicted."""
        return 0 if self._refuses else len(self._free)

    # --- host to disk

    def start_write(self, content: Content) -> tuple[int, ContentEvicted | None] | None:
        """Start writing a block that is not on disk. Return its record and the block that was evicted for it; None if
        there is no room."""
        assert self.on, "the disk is off"
        assert content.key not in self.resident, f"{content.key.hex()} is there"
        assert content.key not in self.writing, f"{content.key.hex()} is being written"
        if self._refuses:
            return None
        taken = (self._free.pop(), None) if self._free else self.resident.evict()
        if taken is not None:
            record, evicted = taken
            self._writes[record] = _Write(content, replaces=evicted is not None)
            self.writing[content.key] = record
        return taken

    def write_done(self, record: int, outcome: WriteOutcome) -> ContentStored | None:
        """End a write. Return None if it failed, or if the disk failed since it started."""
        write = self._writes.pop(record)
        if write.condemned and not write.stray:
            del self.writing[write.content.key]
            self._erasing.add(record)
            return None
        if not write.stray:
            del self.writing[write.content.key]
            if outcome == "ok":
                return self.resident.add(write.content, record)
        if not self.on:  # `turn_on` will find it free
            return None
        self._free.append(record)
        if outcome == "no space" and not write.stray:
            self._refuses |= write.replaces
            self._withheld += self._free
            self._free.clear()
        return None

    def retry_space(self) -> None:
        """Try again whether the disk has space."""
        self._refuses = False
        self._free += self._withheld
        self._withheld.clear()

    # --- disk to host

    def start_read(self, key: ContentKey) -> int:
        """Start reading a block, whose record stays until `read_done`. A block is read by one request at a time."""
        record = self.resident.places[key]
        assert record not in self._reading, f"record {record} is read twice"
        self._reading.add(record)
        return record

    def read_done(self, record: int, key: ContentKey, *, lost: bool) -> ContentEvicted | None:
        """End a read. `lost` says that the record does not have the block's bytes; it is freed."""
        self._reading.remove(record)
        if self.resident.places.get(key) == record:
            if not lost:
                return None
            evicted = self.resident.remove(key)
            self._free.append(record)
            return evicted
        if self.on and record not in self._erasing:  # the disk was off and on again; else `turn_on` will find it free
            self._free.append(record)
        return None

    # --- wrong blocks

    def discard(self, key: ContentKey) -> tuple[int, ContentEvicted] | None:
        """Discard the block: it cannot be found any more, and its record is to be erased, if it has one. If the block
        is being written, it is erased after that."""
        if key in self.writing:
            self._writes[self.writing[key]].condemned = True
        record = self.resident.places.get(key)
        if record is None:
            return None
        self._erasing.add(record)
        return record, self.resident.remove(key)

    def is_erasing(self, record: int) -> bool:
        """Return whether the record is to be erased, and is not erased yet."""
        return record in self._erasing

    def erase_done(self, record: int) -> None:
        """End an erasure, successful or not."""
        self._erasing.remove(record)
        if self.on and record not in self._reading:  # else `read_done` or `turn_on` will find it free
            self._free.append(record)

    # --- off and on

    def turn_off(self) -> list[ContentEvicted]:
        """Turn the tier off: nothing can be written or found. Turning it off again does nothing."""
        self.retry_space()
        self.on = False
        self._free.clear()
        for write in self._writes.values():
            write.stray = True
        self.writing.clear()
        return [self.resident.remove(key) for key in list(self.resident.places)]

    def turn_on(self, found: Sequence[FoundBlock]) -> list[ContentStored]:
        """Turn the tier on with the blocks found on disk, oldest first. The newer of two records with one key
        counts."""
        assert not self.on, "the disk is there already"
        self.on = True
        busy = self._writes.keys() | self._reading | self._erasing
        newest = {one.content.key: one.record for one in found if one.record not in busy}
        stored: list[ContentStored] = []
        for run in _runs([one for one in found if newest.get(one.content.key) == one.record]):
            stored += reversed([self.resident.add(one.content, one.record) for one in reversed(run)])
        used = busy.union(self.resident.places.values())
        self._free = [record for record in range(self.capacity - 1, -1, -1) if record not in used]
        return stored

    # --- inside

    def validate(self) -> None:
        """Raise AssertionError if the records contradict themselves. O(capacity)."""
        self.resident.validate()
        shelved = set(self.resident.places.values())
        free = {*self._free, *self._withheld}
        assert len(free) == len(self._free) + len(self._withheld), "a record is free twice"
        assert not shelved & self._writes.keys(), "a record can be found while it is written"
        assert not shelved & free, "a free record can be found"
        assert not free & self._writes.keys(), "a free record is written"
        assert not free & self._reading, "a free record is read"
        assert not self._erasing & (shelved | free | self._writes.keys()), "a record that is erased is used"
        assert not self.resident.places.keys() & self.writing.keys(), "a block is there and being written"
        assert self.writing == {
            write.content.key: record for record, write in self._writes.items() if not write.stray
        }, "writes are known wrong"
        if self.on:
            used = shelved | self._writes.keys() | self._reading | self._erasing | free
            assert used == set(range(self.capacity)), "a record is lost"
        else:
            assert not self.resident.places, "a block can be found on a disk that is off"
            assert not free, "a record of a disk that is off is free"


def _runs(found: Sequence[FoundBlock]) -> list[list[FoundBlock]]:
    """Return the blocks in the same order, cut where a block does not follow the one before it in a chain."""
    runs: list[list[FoundBlock]] = []
    for one in found:
        if not runs or one.content.parent != runs[-1][-1].content.key:
            runs.append([])
        runs[-1].append(one)
    return runs
