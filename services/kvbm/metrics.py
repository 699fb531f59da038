"""The Prometheus metrics of kvbm. They add up all layouts, since layouts come and go and labels must be few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry

from services.kvbm.tickets.results import ExpiredTicket, TicketStatistics
from services.kvbm.tiers.actions import TierEvent
from services.kvbm.tiers.disk_results import DiskFailure, DiskStatistics, LoadedFromDisk, WrittenToDisk
from services.kvbm.tiers.hit_window import LookupCounts
from shared.blocks import ContentEvicted
from shared.metrics import ROUND_TRIP_SECONDS, STEP_SECONDS, counter, gauge, histogram

EvictionReason = Literal["room", "lost", "disk gone", "discarded"]
"""Why a block left a tier.

    room         another block needed its place
    lost         its bytes were damaged
    disk gone    the disk tier failed
    discarded    an engine said that it may be wrong
"""


class StoreMetrics:
    """The metrics of one kvbm process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.request_seconds = histogram(
            registry,
            "headrace_kvbm_request_seconds",
            "Time from a request's arrival to its (first) reply",
            ROUND_TRIP_SECONDS,
            ["operation"],
        )
        self.refusals = counter(registry, "headrace_kvbm_refusals", "Requests refused, by code", ["code"])
        self.unanswered = counter(
            registry,
            "headrace_kvbm_unanswered_requests",
            "Replies that could not be sent: NATS was unreachable, or the socket's engine was gone",
        )
        self.lookups = counter(registry, "headrace_kvbm_lookups", "Fetches: prefixes that engines asked for")
        self.asked_blocks = counter(
            registry, "headrace_kvbm_asked_blocks", "Blocks of the prefixes that engines asked for"
        )
        self.hit_blocks = counter(
            registry, "headrace_kvbm_hit_blocks", "Blocks asked for that were found, by tier", ["tier"]
        )
        self.hit_bytes = counter(
            registry, "headrace_kvbm_hit_bytes", "Bytes of the blocks that were found, by tier", ["tier"]
        )
        self.hit_rate = gauge(
            registry, "headrace_kvbm_hit_rate", "Blocks found ÷ blocks asked for over the sliding window", ["tier"]
        )
        self.offered_blocks = counter(
            registry,
            "headrace_kvbm_store_blocks",
            "Blocks that workers offered to write: granted, known (stored or on their way), declined",
            ["outcome"],
        )
        self.committed_blocks = counter(registry, "headrace_kvbm_committed_blocks", "Blocks written by workers")
        self.committed_bytes = counter(registry, "headrace_kvbm_committed_bytes", "Bytes written by workers")
        self.evictions = counter(
            registry,
            "headrace_kvbm_evicted_blocks",
            "Blocks that left a tier: room (another block needed the place), lost (damaged), disk gone, discarded "
            "(an engine said that they may be wrong), layout gone (its arena went to another layout)",
            ["tier", "reason"],
        )
        self.expiries = counter(registry, "headrace_kvbm_expired_tickets", "Tickets that expired, by kind", ["kind"])
        self.dead_owners = counter(registry, "headrace_kvbm_dead_owners", "Engine processes that died while attached")
        self.disk_seconds = histogram(
            registry,
            "headrace_kvbm_disk_seconds",
            "Time for a block's checksum and disk request, without its time in the queue",
            STEP_SECONDS,
            ["operation"],
        )
        self.disk_bytes = counter(
            registry, "headrace_kvbm_disk_bytes", "Bytes read from and written to disk", ["operation"]
        )
        self.disk_lost = counter(
            registry,
            "headrace_kvbm_disk_lost_blocks",
            "Blocks that could not be read or written",
            ["operation", "reason"],
        )
        self.peer_sent_blocks = counter(
            registry, "headrace_kvbm_peer_sent_blocks", "Blocks that other machines' kvbms were sent"
        )
        self.peer_sent_bytes = counter(
            registry, "headrace_kvbm_peer_sent_bytes", "Bytes of blocks that other machines' kvbms were sent"
        )
        self.peer_read_blocks = counter(
            registry, "headrace_kvbm_peer_read_blocks", "Blocks that were read from other machines' kvbms and published"
        )
        self.peer_read_bytes = counter(
            registry,
            "headrace_kvbm_peer_read_bytes",
            "Bytes of blocks that were read from other machines and published",
        )
        self.peer_read_seconds = histogram(
            registry, "headrace_kvbm_peer_read_seconds", "Time of one read from another machine's kvbm", STEP_SECONDS
        )
        self.peer_reads = counter(
            registry,
            "headrace_kvbm_peer_reads",
            "Reads from other machines' kvbms by outcome: whole, part, nothing, full (this pool had no room)",
            ["outcome"],
        )
        self.peer_fetches = counter(
            registry,
            "headrace_kvbm_peer_fetches",
            "Fetches that asked other machines by outcome: read, nothing (they had none), not worth it (too slow "
            "for the time), late, fault, full (too many at once: they were not asked)",
            ["outcome"],
        )
        self.peer_faults = counter(
            registry,
            "headrace_kvbm_peer_faults",
            "Faults between this kvbm and those of other machines, by direction (lend, read) and reason",
            ["direction", "reason"],
        )
        self.peer_loans = gauge(registry, "headrace_kvbm_peer_loans", "Reads by other machines that are under way")
        self.peer_lent_bytes = gauge(
            registry, "headrace_kvbm_peer_lent_bytes", "Bytes that are held for reads by other machines"
        )
        self.slots = gauge(registry, "headrace_kvbm_slots", "Slots of the host tier, by state", ["state"])
        self.records = gauge(registry, "headrace_kvbm_disk_records", "Records of the disk tier, by state", ["state"])
        self.spills_waiting = gauge(
            registry, "headrace_kvbm_spills_waiting_blocks", "Blocks that wait to be written to disk"
        )
        self.tickets = gauge(registry, "headrace_kvbm_tickets", "Open tickets, by kind", ["kind"])
        self.owners = gauge(
            registry,
            "headrace_kvbm_owners",
            "Engine processes attached, and reads by and from other machines under way",
        )
        self.layouts = gauge(registry, "headrace_kvbm_layouts", "Layouts that have an arena")
        self.disks = gauge(registry, "headrace_kvbm_disks", "Disk tiers of the layouts, by state", ["state"])
        self.pool_bytes = gauge(registry, "headrace_kvbm_pool_bytes", "Size of the pool in bytes")
        self.reserved_bytes = gauge(
            registry, "headrace_kvbm_pool_reserved_bytes", "Bytes of the pool whose memory is made"
        )

    def count_lookup(self, found: LookupCounts, block_bytes: int) -> None:
        """Count one fetch, by what is known when its first reply is sent."""
        self.lookups.inc(found.lookups)
        self.asked_blocks.inc(found.asked)
        for tier, blocks in (("host", found.host), ("disk", found.disk)):
            if blocks:
                self.hit_blocks.labels(tier).inc(blocks)
                self.hit_bytes.labels(tier).inc(blocks * block_bytes)

    def count_offer(self, granted: int, known: int, declined: int) -> None:
        """Count the blocks that one store offered, by what became of them."""
        for outcome, blocks in (("granted", granted), ("known", known), ("declined", declined)):
            if blocks:
                self.offered_blocks.labels(outcome).inc(blocks)

    def count_commit(self, blocks: int, block_bytes: int) -> None:
        """Count the blocks of one store that was committed."""
        self.committed_blocks.inc(blocks)
        self.committed_bytes.inc(blocks * block_bytes)

    def count_evictions(self, events: Iterable[TierEvent], why: EvictionReason) -> None:
        """Count the evictions among the events; `why` is the reason of them all."""
        gone = Counter(tier for tier, event in events if isinstance(event, ContentEvicted))
        for tier, blocks in gone.items():
            self.evictions.labels(tier, why).inc(blocks)

    def count_expired(self, tickets: Iterable[ExpiredTicket]) -> None:
        """Count tickets that expired, by time or with a worker's lease."""
        for ticket in tickets:
            self.expiries.labels(ticket.kind).inc()

    def count_disk_request(
        self,
        operation: Literal["read", "write"],
        outcome: LoadedFromDisk | WrittenToDisk | DiskFailure,
        size_bytes: int,
    ) -> None:
        """Count one disk request that has ended."""
        if isinstance(outcome, DiskFailure):
            self.disk_lost.labels(operation, outcome.reason).inc()
            return
        self.disk_seconds.labels(operation).observe(outcome.took_s)
        self.disk_bytes.labels(operation).inc(size_bytes)

    def set_gauges(self, layouts: list[TicketStatistics], disks: list[DiskStatistics], found: LookupCounts) -> None:
        """Set all gauges to the state of now; `found` is the sum of the layouts' windows."""
        for tier, blocks in (("host", found.host), ("disk", found.disk)):
            self.hit_rate.labels(tier).set(found.rate(blocks) or 0.0)
        hosts = [each.tiers.host for each in layouts]
        records = [each.tiers.disk for each in layouts]
        for state in ("free", "writing", "loading", "ready", "leaving", "quarantined", "held"):
            self.slots.labels(state).set(sum(getattr(each, state) for each in hosts))
        for state in ("free", "withheld", "writing", "ready", "reading", "erasing"):
            self.records.labels(state).set(sum(getattr(each, state) for each in records))
        self.spills_waiting.set(sum(each.tiers.spills_waiting for each in layouts))
        for kind in ("stores", "fetches", "expired"):
            self.tickets.labels(kind).set(sum(getattr(each, kind) for each in layouts))
        self.owners.set(sum(each.owners for each in layouts))
        self.layouts.set(len(layouts))
        for state in ("on", "scanning", "off"):
            self.disks.labels(state).set(sum(each.state == state for each in disks))
