"""The Prometheus metrics of kvbm. They add up all layouts, since layouts come and go and labels must be few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry

from services.kvbm.tickets.results import ExpiredTicket, TicketStatistics
from services.kvbm.tiers.actions import TierEvent
from services.kvbm.tiers.disk_records import DiskFailure, DiskStatistics, LoadedFromDisk, WrittenToDisk
from services.kvbm.tiers.hit_window import LookupCounts
from shared.blocks import ContentEvicted
from shared.metrics import ROUND_TRIP_SECONDS, STEP_SECONDS, counter, gauge, histogram, register_metrics

EvictionReason = Literal["room", "lost", "disk gone", "discarded"]
"""Why a block left a tier.

    room         another block needed its place
    lost         its bytes were damaged
    disk gone    the disk tier failed
    discarded    an engine said that it may be wrong
"""


class StoreMetrics:
    """The metrics of one kvbm process."""

    # fmt: off
    request_seconds = histogram("headrace_kvbm_request_seconds", "operation", ROUND_TRIP_SECONDS,
        "Time from a request's arrival to its (first) reply", "kvbm's core is full.")
    refusals = counter("headrace_kvbm_refusals", "code", "Requests refused, by code", "See kvbm's log.")
    unanswered = counter("headrace_kvbm_unanswered_requests", "",
        "Replies that could not be sent: NATS was unreachable, the socket's engine was gone, or kvbm failed over its "
        "request",
        "NATS was away, or engines died; a failure is in kvbm's log.")
    lookups = counter("headrace_kvbm_lookups", "", "Fetches: prefixes that engines asked for")
    asked_blocks = counter("headrace_kvbm_asked_blocks", "", "Blocks of the prefixes that engines asked for")
    hit_blocks = counter("headrace_kvbm_hit_blocks", "tier",
        "Blocks asked for that were found, by tier", "The higher the better.")
    hit_bytes = counter("headrace_kvbm_hit_bytes", "tier",
        "Bytes of the blocks that were found, by tier", "The higher the better.")
    hit_rate = gauge("headrace_kvbm_hit_rate", "tier",
        "Blocks found ÷ blocks asked for over the sliding window", "The higher the better.")
    offered_blocks = counter("headrace_kvbm_store_blocks", "outcome",
        "Blocks that workers offered to write: granted, known (stored or on their way), declined",
        "`declined`: the pool is full of blocks in use, or of better ones: enlarge it.")
    committed_blocks = counter("headrace_kvbm_committed_blocks", "", "Blocks written by workers")
    committed_bytes = counter("headrace_kvbm_committed_bytes", "", "Bytes written by workers")
    evictions = counter("headrace_kvbm_evicted_blocks", "tier reason",
        "Blocks that left a tier: room (another block needed the place), lost (damaged), disk gone, discarded (an "
        "engine said that they may be wrong), layout gone (its arena went to another layout)",
        "`room`, with a low hit rate: the tier is too small. `lost`, `disk gone`: the disk fails.")
    expiries = counter("headrace_kvbm_expired_tickets", "kind",
        "Tickets that expired, by kind", "Engines die or hang between asking and copying.")
    dead_owners = counter("headrace_kvbm_dead_owners", "",
        "Engine processes that ended while attached, also in order, as at a restart",
        "More than there were restarts: see the workers' logs.")
    disk_seconds = histogram("headrace_kvbm_disk_seconds", "operation", STEP_SECONDS,
        "Time for a block's checksum and disk request, without its time in the queue", "The disk is slow or full.")
    disk_bytes = counter("headrace_kvbm_disk_bytes", "operation", "Bytes read from and written to disk")
    disk_lost = counter("headrace_kvbm_disk_lost_blocks", "operation reason",
        "Blocks that could not be read or written", "See kvbm's log and the kernel's; the disk may fail.")
    peer_sent_blocks = counter("headrace_kvbm_peer_sent_blocks", "", "Blocks that other machines' kvbms were sent")
    peer_sent_bytes = counter("headrace_kvbm_peer_sent_bytes", "",
        "Bytes of blocks that other machines' kvbms were sent")
    peer_read_blocks = counter("headrace_kvbm_peer_read_blocks", "",
        "Blocks that were read from other machines' kvbms and published")
    peer_read_bytes = counter("headrace_kvbm_peer_read_bytes", "",
        "Bytes of blocks that were read from other machines and published")
    peer_read_seconds = histogram("headrace_kvbm_peer_read_seconds", "", STEP_SECONDS,
        "Time of one read from another machine's kvbm", "A slow network, or a peer without a core to spare.")
    peer_reads = counter("headrace_kvbm_peer_reads", "outcome",
        "Reads from other machines' kvbms by outcome: whole, part, nothing, full (this pool had no room)",
        "`full`: the pool is full of blocks in use.")
    peer_fetches = counter("headrace_kvbm_peer_fetches", "outcome",
        "Fetches that asked other machines by outcome: read, nothing (they had none), not worth it (too slow for the "
        "time), late, fault, full (too many at once: they were not asked)",
        "`late`, `not worth it`: the network is slow for `peers.wait_s`, or was in the last read; the log has the "
        "rates. `full`: more `peers.reads`.")
    peer_faults = counter("headrace_kvbm_peer_faults", "direction reason",
        "Faults between this kvbm and those of other machines, by direction (lend, read) and reason",
        "[peers.md](peers.md#when-it-does-not-work) says what each reason means.")
    peer_loans = gauge("headrace_kvbm_peer_loans", "",
        "Reads by other machines that are under way", "Near `peers.loans`: further ones are refused.")
    peer_lent_bytes = gauge("headrace_kvbm_peer_lent_bytes", "",
        "Bytes that are held for reads by other machines", "Readers are slow, or freeze.")
    slots = gauge("headrace_kvbm_slots", "state",
        "Slots of the host tier, by state",
        "`quarantined`: engines died; their slots come back when the kernel proves it.")
    records = gauge("headrace_kvbm_disk_records", "state", "Records of the disk tier, by state")
    spills_waiting = gauge("headrace_kvbm_spills_waiting_blocks", "",
        "Blocks that wait to be written to disk", "The disk is slower than what is written.")
    tickets = gauge("headrace_kvbm_tickets", "kind", "Open tickets, by kind", "`expired`: engines that hang.")
    owners = gauge("headrace_kvbm_owners", "",
        "Engine processes attached, and reads by and from other machines under way",
        "Fewer than workers: see `headrace_kvbm_attached`.")
    layouts = gauge("headrace_kvbm_layouts", "",
        "Layouts that have an arena", "More than models: workers differ in block size or type.")
    disks = gauge("headrace_kvbm_disks", "state",
        "Disk tiers of the layouts, by state", "`off`: after errors; see kvbm's log.")
    pool_bytes = gauge("headrace_kvbm_pool_bytes", "", "Size of the pool in bytes")
    reserved_bytes = gauge("headrace_kvbm_pool_reserved_bytes", "", "Bytes of the pool whose memory is made")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        register_metrics(self, registry)

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
