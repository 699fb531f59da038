"""The sizes of the tiers, and what the tiers decide: slots to write to, reads from disk, spills to disk. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from services.kvbm.tiers.disk_records import RecordStatistics
from services.kvbm.tiers.host_slots import SlotStatistics
from shared.blocks import Content, PoolEvent
from shared.messages.kv_events import Tier

TierEvent = tuple[Tier, PoolEvent]
ReadOutcome = Literal["ok", "lost", "failed"]
"""How a read ended. ok: the bytes are in the slot. lost: the record does not have them, and is freed. failed: not now,
but the record may be right."""


class TierSizes(Struct, frozen=True):
    """The sizes of one layout's tiers, and how often a block must be seen to be worth a place."""

    slots: int
    records: int = 0
    """The number of records on disk; 0 means no disk tier."""
    host_sightings: int = 1
    """How often a block must have been seen before it gets a slot; a worker's offer counts as one."""
    disk_sightings: int = 2
    """How often a block in the host tier must have been seen before it goes to disk."""
    fill_disk: bool = True
    """Whether a block goes to disk at its first sighting too, while the disk has free records."""
    remembered: int = 0
    """The number of blocks whose sightings are counted, stored or not; 0 means four for each slot and one for each
    record."""
    held_share: float = 0.5
    """The share of the slots that readers and the disk's writer may hold at once; the rest is room to write to."""
    spare_slots: int = 64
    """The number of slots that `prepare` keeps free; never more than an eighth of all."""


class Offered(Struct, frozen=True):
    """What becomes of the blocks that a worker offers."""

    indices: list[int]
    """The indices, in the request, of the blocks to write."""
    slots: list[int]
    """The slots to write these blocks to."""
    known: int
    """The number of blocks that are stored or on their way."""
    declined: int
    """The number of blocks that are not worth keeping, or have no room."""
    events: list[TierEvent]
    rare: list[int] = []
    """The indices of the declined blocks that were seen too rarely; the others had no room."""
    ticket: int = 0
    """The ticket that `tickets` opens for the slots; 0 if there is none."""


class Read(Struct, frozen=True):
    """Asks the shell to read the record into the slot, and to report how that ended."""

    slot: int
    record: int
    content: Content


class Spill(Struct, frozen=True):
    """Asks the shell to write the slot's bytes to the record, and to report how that ended."""

    slot: int
    record: int
    content: Content


class HeldPrefix(Struct, frozen=True):
    """The longest stored prefix, with one hold on each slot. Slots that reads fill, from here or for an earlier fetch,
    are loading."""

    slots: list[int]
    loading: list[int]
    """The indices of slots that are still loading, ascending."""
    reads: list[Read]
    """The reads to start, in order."""
    events: list[TierEvent]
    ticket: int = 0
    """The ticket that `tickets` opens for the slots; 0 if there is none."""
    awaited: int = 0
    """The number of blocks after the prefix that the ticket waits for."""

    @property
    def ready(self) -> int:
        """The number of leading slots that can be read at once."""
        return self.loading[0] if self.loading else len(self.slots)


class TierStatistics(Struct, frozen=True):
    """Counts of both tiers, now."""

    host: SlotStatistics
    disk: RecordStatistics
    spills_waiting: int
