"""What the tiers are told, and what they decide: sizes, slots to write to, reads of the disk, spills to it. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from services.kvbm.tiers.disk_records import RecordStatistics
from services.kvbm.tiers.host_slots import SlotStatistics
from shared.blocks import Content, PoolEvent
from shared.messages import Tier

TierEvent = tuple[Tier, PoolEvent]
ReadOutcome = Literal["ok", "lost", "failed"]
"""Of a read: the bytes are in the slot; the record has not got them, and goes; not now, but the record may be right."""


class TierSizes(Struct, frozen=True):
    """How much there is of everything, and from when on a block is worth it."""

    slots: int
    records: int = 0
    """0: no disk tier."""
    host_sightings: int = 1
    """A block offered by a worker gets a slot when it was seen as often, this offer counted."""
    disk_sightings: int = 2
    """A block in the host tier goes to disk when it was seen as often …"""
    fill_disk: bool = True
    """… or while the disk has records that are free."""
    remembered: int = 0
    """Blocks whose sightings are counted, there or not; 0: four for each slot and one for each record."""
    held_share: float = 0.5
    """Of the slots, that readers may hold at once, the disk's writer counted; the rest is room to write to."""
    spare_slots: int = 64
    """Kept free by `prepare`; never more than an eighth."""
    leaves_first: bool = False
    """Whether a block stays as long as one that follows it is in the same tier."""


class Offered(Struct, frozen=True):
    """What comes of blocks that a worker could write."""

    indices: list[int]
    """Of those to write, into the request's."""
    slots: list[int]
    """Where to."""
    known: int
    """Blocks that are there or on their way."""
    declined: int
    """Blocks not worth keeping, or without room."""
    events: list[TierEvent]


class Read(Struct, frozen=True):
    """Bring the record's bytes to the slot, and say how it went."""

    slot: int
    record: int
    content: Content


class Spill(Struct, frozen=True):
    """Write the slot's bytes to the record, and say how it went."""

    slot: int
    record: int
    content: Content


class HeldPrefix(Struct, frozen=True):
    """The longest prefix, each slot held once. Those that `reads` fill, here or for an earlier fetch, are loading."""

    slots: list[int]
    loading: list[int]
    """Indices of the slots that are not there yet, ascending."""
    reads: list[Read]
    """To be begun, in order."""
    events: list[TierEvent]


class TierStatistics(Struct, frozen=True):
    """Both tiers, now."""

    host: SlotStatistics
    disk: RecordStatistics
    spills_waiting: int
