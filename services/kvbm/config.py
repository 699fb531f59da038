"""kvbm's settings."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from services.kvbm.tickets.results import TicketLimits
from services.kvbm.tiers import policies
from services.kvbm.tiers.actions import TierSizes
from shared.config import DiscoveryConfig, NatsConfig, ObserveConfig

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class PoolConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host tier: memory that kvbm and the engines of its machine share."""

    directory: Annotated[str, Meta(min_length=1)]
    """On a tmpfs, this user's alone; made where it is missing. Workers name the same one."""
    size_bytes: Positive
    arenas: Positive = 1
    """Equal parts, one a layout; so many layouts can be served at once. The disk tier is divided likewise."""
    prefault_threads: Positive = 4
    """Make the pool's memory at the start, at low priority."""


class DiskConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The disk tier."""

    directory: str = ""
    """Made where it is missing, but for its parents; empty: no disk tier."""
    limit_bytes: Positive = 64 << 30
    """For all layouts, those of before counted."""
    segment_bytes: Positive = 1 << 30
    """Of a file, about."""
    min_free_bytes: Natural = 4 << 30
    """No file is made that would leave less to others."""
    threads: Positive = 16
    """Requests that the disk has at once."""
    queue: Positive = 8192
    """Reads that are queued or under way, and writes. A block whose read finds no room there is computed instead."""
    retry_s: Seconds = 5.0
    """How often it is looked at, and tried again where it is off or full."""


class TiersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept."""

    host_policy: str = policies.DEFAULT
    """Who leaves the host tier: reuse, lru, s3-fifo or module:attribute."""
    disk_policy: str = policies.DISK_DEFAULT
    host_sightings: Positive = 1
    """A block offered by a worker gets a slot when it was seen as often, this offer counted."""
    disk_sightings: Positive = 2
    """A block goes to disk when it was seen as often …"""
    fill_disk: bool = True
    """… or while the disk has room that was never used."""
    held_share: Share = 0.5
    """Of the slots, that readers may hold at once. Nothing more is read from disk while these and reads that nobody
    waits for any more are as many."""
    leaves_first: bool = False
    """Whether a block stays as long as one that follows it is in the same tier."""

    def sizes(self, slots: int, records: int) -> TierSizes:
        """Of one layout's tiers."""
        return TierSizes(
            slots=slots,
            records=records,
            host_sightings=self.host_sightings,
            disk_sightings=self.disk_sightings,
            fill_disk=self.fill_disk,
            held_share=self.held_share,
            leaves_first=self.leaves_first,
        )


class StatisticsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What people are told."""

    window_s: Seconds = 300.0
    """Of the hit rates."""
    log_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0
    """Between two lines of the log on each layout; 0: none."""


class KvbmConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it."""

    namespace: str = "default"
    pool: PoolConfig
    disk: DiskConfig = DiskConfig()
    tiers: TiersConfig = TiersConfig()
    tickets: TicketLimits = TicketLimits()
    statistics: StatisticsConfig = StatisticsConfig()
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    observe: ObserveConfig = ObserveConfig()
