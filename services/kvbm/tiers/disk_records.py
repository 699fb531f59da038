"""DiskRecords: the records of one layout's disk tier, and which block each of them has. Pure.

    off ──back(found)──▶ on ──gone──▶ off              what a disk holds is found first

            write                  written                 read
    free ───────────▶ writing ────────────────▶ ready ◀──────────▶ ready, being read
     ▲                   │ it failed              │      read_done
     └───────────────────┴────────────────────────┘ the policy's victim (not while it is read); lost; gone
     ▲                   │ discarded meanwhile    │ discard
     └──── erased ─── erasing ◀───────────────────┘

A record whose block may be wrong is not used again before the disk has tried to erase it. Where the disk cannot, or is
off by then, a later start finds the block again; the next sequence that it fails has it discarded again.

Where the disk has no space for new records, those that are free are withheld, and blocks go for others; where it has
none even for these, nothing is written. Both until `space_again`, or until it has gone and come back.

A request that is under way when the disk goes ends like any other. The disk that comes back need not be the one it went
to: until it has ended its record is neither found nor used again, and a write from before `gone` publishes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from services.kvbm.tiers.disk_results import FoundBlock
from services.kvbm.tiers.policies import EvictionPolicy
from services.kvbm.tiers.residency import Residency
from shared.blocks import Content, Evicted, Stored
from shared.hashing import ContentKey

WriteOutcome = Literal["ok", "failed", "no space", "damaged"]
"""damaged: the memory that was to be written does not hold the block's bytes."""


class RecordStatistics(Struct, frozen=True):
    """Records by state; while the disk is on they add up to the capacity."""

    capacity: int
    on: bool
    free: int
    withheld: int
    """Free, but the disk has no space."""
    writing: int
    ready: int
    reading: int
    """Most of them are ready too: a record that went while it was read is not."""
    erasing: int = 0


class _Write(Struct):
    content: Content
    replaces: bool
    """The record had another block before."""
    stray: bool = False
    """It began before the disk went."""
    condemned: bool = False
    """The block is not to be kept."""


class DiskRecords:
    """See the module. Records are 0 … capacity - 1; a capacity of 0 is a machine without a disk tier."""

    def __init__(self, policy: EvictionPolicy, capacity: int, *, leaves_first: bool) -> None:
        self.capacity = capacity
        self.resident = Residency(policy, self._may_leave, leaves_first=leaves_first)
        self.on = False
        self.writing: dict[ContentKey, int] = {}
        """What is being written, and where; without the stray ones. For reading only."""
        self._free: list[int] = []
        self._withheld: list[int] = []
        self._refuses = False
        """Whether the disk had no space even for a record that was written before."""
        self._writes: dict[int, _Write] = {}
        self._reading: set[int] = set()
        self._erasing: set[int] = set()

    def statistics(self) -> RecordStatistics:
        """Counts by state, in O(1)."""
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
        """Records that a write takes before any block has to go."""
        return 0 if self._refuses else len(self._free)

    # --- down

    def start_write(self, content: Content) -> tuple[int, Evicted | None] | None:
        """A record for a block that the disk has not, and who had to go for it; None: there is no room."""
        assert self.on, "the disk is off"
        assert content.key not in self.resident, f"{content.key.hex()} is there"
        assert content.key not in self.writing, f"{content.key.hex()} is being written"
        if self._refuses:
            return None
        evicted: Evicted | None = None
        if not self._free:
            key = self.resident.victim()
            if key is None:
                return None
            record = self.resident.places[key]
            evicted = self.resident.remove(key)
        else:
            record = self._free.pop()
        self._writes[record] = _Write(content, replaces=evicted is not None)
        self.writing[content.key] = record
        return record, evicted

    def write_done(self, record: int, outcome: WriteOutcome) -> Stored | None:
        """The write has ended. None: it failed, or the disk has gone since it began."""
        write = self._writes.pop(record)
        if write.condemned and not write.stray:
            del self.writing[write.content.key]
            self._erasing.add(record)
            return None
        if not write.stray:
            del self.writing[write.content.key]
            if outcome == "ok":
                return self.resident.add(write.content, record)
        if not self.on:  # `back` will see that it is free
            return None
        self._free.append(record)
        if outcome == "no space" and not write.stray:
            self._refuses |= write.replaces
            self._withheld += self._free
            self._free.clear()
        return None

    def retry_space(self) -> None:
        """It is time to try whether the disk has space."""
        self._refuses = False
        self._free += self._withheld
        self._withheld.clear()

    # --- up

    def start_read(self, key: ContentKey) -> int:
        """The record of a block that is there; it stays until `read_done`. A block is read by one request at a time."""
        record = self.resident.places[key]
        assert record not in self._reading, f"record {record} is read twice"
        self._reading.add(record)
        return record

    def read_done(self, record: int, key: ContentKey, *, lost: bool) -> Evicted | None:
        """The read has ended; `lost`: the record has not the block's bytes, and goes."""
        self._reading.remove(record)
        if self.resident.places.get(key) == record:
            if not lost:
                return None
            evicted = self.resident.remove(key)
            self._free.append(record)
            return evicted
        if self.on and record not in self._erasing:  # the disk went and came back; else `back` will see that it is free
            self._free.append(record)
        return None

    # --- wrong blocks

    def discard(self, key: ContentKey) -> tuple[int, Evicted] | None:
        """The block cannot be found any more, and its record, if there is one, is to be erased. What is being written
        of it is to be erased when that has ended."""
        if key in self.writing:
            self._writes[self.writing[key]].condemned = True
        record = self.resident.places.get(key)
        if record is None:
            return None
        self._erasing.add(record)
        return record, self.resident.remove(key)

    def is_erasing(self, record: int) -> bool:
        """Whether it is to be erased, and is not yet."""
        return record in self._erasing

    def erase_done(self, record: int) -> None:
        """The disk has tried to."""
        self._erasing.remove(record)
        if self.on and record not in self._reading:  # else `read_done` or `back` will see that it is free
            self._free.append(record)

    # --- off and on

    def turn_off(self) -> list[Evicted]:
        """Nothing can be written or found until `back`. Again: nothing."""
        self.retry_space()
        self.on = False
        self._free.clear()
        for write in self._writes.values():
            write.stray = True
        self.writing.clear()
        return [self.resident.remove(key) for key in list(self.resident.places)]

    def turn_on(self, found: Sequence[FoundBlock]) -> list[Stored]:
        """The disk is there, with these blocks, oldest first; of two records with one key the newer counts."""
        assert not self.on, "the disk is there already"
        self.on = True
        busy = self._writes.keys() | self._reading | self._erasing
        newest = {one.content.key: one.record for one in found if one.record not in busy}
        stored: list[Stored] = []
        for run in _runs([one for one in found if newest.get(one.content.key) == one.record]):
            stored += reversed([self.resident.add(one.content, one.record) for one in reversed(run)])
        used = busy.union(self.resident.places.values())
        self._free = [record for record in range(self.capacity - 1, -1, -1) if record not in used]
        return stored

    # --- inside

    def _may_leave(self, record: int) -> bool:
        return record not in self._reading

    def validate(self) -> None:
        """Raises AssertionError where the records contradict themselves. O(capacity)."""
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
    """The same in the same order, cut where a block does not follow the one before it in a chain."""
    runs: list[list[FoundBlock]] = []
    for one in found:
        if not runs or one.content.parent != runs[-1][-1].content.key:
            runs.append([])
        runs[-1].append(one)
    return runs
