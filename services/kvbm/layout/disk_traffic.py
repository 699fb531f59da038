"""Carries out the reads, spills and erasures that the tiers decide, between one layout's slots and its disk.

    Read   slot's generation grows ──▶ Disk.read  into the slot ──▶ ok | lost | failed  ──▶ read_done
    Spill  held by the tiers       ──▶ Disk.write from the slot ──▶ ok | no space | damaged | failed ──▶ spill_done
    record of a discarded block    ──▶ Disk.erase               ──▶ any outcome             ──▶ erased

Each ends exactly once, even if the disk fails meanwhile. A slot's memory is in use until then, so an arena is given to
another layout only when `under_way` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from services.kvbm.disk.disk import Disk
from services.kvbm.metrics import StoreMetrics
from services.kvbm.tickets.packing import SlotChecksums
from services.kvbm.tiers.actions import Read, ReadOutcome, Spill
from services.kvbm.tiers.disk_records import DiskFailure, LoadedFromDisk, WriteOutcome, WrittenToDisk
from shared.pool.map import ArenaMap

SPILLS_MOST = 64
"""Spills under way at once: enough for every thread of a disk, and few slots that cannot be evicted."""


class DiskTraffic:
    """The disk requests of one layout; without a disk there are none."""

    def __init__(
        self,
        disk: Disk | None,
        slots: ArenaMap,
        checksums: SlotChecksums,
        spills_most: int,
        *,
        read_done: Callable[[Read, ReadOutcome], None],
        spill_done: Callable[[Spill, WriteOutcome], None],
        erased: Callable[[int], None],
        metrics: StoreMetrics,
    ) -> None:
        self._disk = disk
        self._payload_bytes = 0 if disk is None else disk.geometry.payload_bytes
        self._slots = slots
        self._checksums = checksums
        self._spills_most = spills_most
        self._read_done = read_done
        self._spill_done = spill_done
        self._erased = erased
        self._metrics = metrics
        self._reading = 0
        self._spilling = 0

    @property
    def under_way(self) -> int:
        """The number of slots that threads may be touching."""
        return self._reading + self._spilling

    @property
    def room(self) -> int:
        """The number of spills that may be started now."""
        return 0 if self._disk is None else self._spills_most - self._spilling

    def read(self, reads: Iterable[Read]) -> None:
        """Start these reads, in order."""
        for read in reads:
            assert self._disk is not None, "a read without a disk"
            self._slots.grant(read.slot)
            self._checksums.clear((read.slot,))
            memory = self._slots.slot(read.slot)
            self._reading += 1
            self._disk.read(read.record, read.content.key, memory, partial(self._read_ended, read, memory))

    def spill(self, spills: Iterable[Spill]) -> None:
        """Start these spills, at most `room`."""
        for spill in spills:
            assert self._disk is not None, "a spill without a disk"
            assert self.room, "more spills than there is room for"
            memory = self._slots.slot(spill.slot)
            self._spilling += 1
            done = partial(self._spill_ended, spill, memory)
            self._disk.write(spill.record, spill.content, memory, done, checksum=self._checksums.get(spill.slot))

    def erase(self, records: Iterable[int]) -> None:
        """Start erasing these records. Erasing touches no slot: only the record stays in use until the end."""
        for record in records:
            assert self._disk is not None, "a record without a disk"
            self._disk.erase(record, partial(self._erase_ended, record))

    def _erase_ended(self, record: int, outcome: WrittenToDisk | DiskFailure) -> None:
        if isinstance(outcome, DiskFailure):
            self._metrics.count_disk_request("write", outcome, 0)
        self._erased(record)

    def _read_ended(self, read: Read, memory: memoryview, outcome: LoadedFromDisk | DiskFailure) -> None:
        memory.release()
        self._reading -= 1
        if isinstance(outcome, LoadedFromDisk):
            self._checksums.set(read.slot, outcome.checksum)
        self._metrics.count_disk_request("read", outcome, self._payload_bytes)
        self._read_done(read, _of_read(outcome))

    def _spill_ended(self, spill: Spill, memory: memoryview, outcome: WrittenToDisk | DiskFailure) -> None:
        memory.release()
        self._spilling -= 1
        self._metrics.count_disk_request("write", outcome, self._payload_bytes)
        self._spill_done(spill, _of_write(outcome))


def _of_read(outcome: LoadedFromDisk | DiskFailure) -> ReadOutcome:
    if isinstance(outcome, LoadedFromDisk):
        return "ok"
    return "lost" if outcome.tried else "failed"


def _of_write(outcome: WrittenToDisk | DiskFailure) -> WriteOutcome:
    if isinstance(outcome, WrittenToDisk):
        return "ok"
    return outcome.reason if outcome.reason in ("no space", "damaged") else "failed"
