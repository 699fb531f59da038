"""Describes a layout for people: as a Struct, and as a line of the log. Pure."""

from __future__ import annotations

from msgspec import Struct

from services.kvbm.tickets.results import TicketStatistics
from services.kvbm.tiers.disk_results import DiskStatistics
from services.kvbm.tiers.hit_window import LookupCounts
from shared.messages.kv_events import Tier
from shared.messages.kvbm import LayoutState, StoreLayout, TierState


class LayoutFacts(Struct, frozen=True):
    """All facts about one layout that people see."""

    layout: StoreLayout
    digest: str
    tickets: TicketStatistics
    disk: DiskStatistics | None
    """None if there is no disk tier."""
    found: LookupCounts
    """The lookups of the window."""
    problems: dict[Tier, str]
    """What is wrong with each tier's policy; empty if nothing is."""


def state(facts: LayoutFacts) -> LayoutState:
    """Return the layout's part of a KvbmState."""
    tickets = facts.tickets
    return LayoutState(
        layout=facts.digest,
        model=facts.layout.model,
        kv=facts.layout.kv,
        host=_host(facts),
        disk=None if facts.disk is None else _disk(facts, facts.disk),
        owners=tickets.owners,
        tickets={"store": tickets.stores, "fetch": tickets.fetches, "expired": tickets.expired},
    )


def _host(facts: LayoutFacts) -> TierState:
    host, awaited = facts.tickets.tiers.host, facts.tickets.awaited
    reason = facts.problems["host"]
    if awaited:
        reason = f"{awaited} engines of a former kvbm may still write"
    elif host.quarantined:
        reason = f"{host.quarantined} slots wait for engines whose tickets expired"
    return TierState(
        state="quarantined" if awaited and host.quarantined else "on",
        reason=reason,
        capacity_blocks=host.capacity,
        blocks=host.ready,
        hit_rate=facts.found.rate(facts.found.host),
    )


def _disk(facts: LayoutFacts, disk: DiskStatistics) -> TierState:
    records = facts.tickets.tiers.disk
    return TierState(
        state=disk.state,
        reason=disk.reason or facts.problems["disk"],
        capacity_blocks=records.capacity,
        blocks=records.ready,
        hit_rate=facts.found.rate(facts.found.disk),
    )


def line(facts: LayoutFacts, window_s: float) -> str:
    """Return the layout's line for the log."""
    tickets, found = facts.tickets, facts.found
    host, disk = tickets.tiers.host, tickets.tiers.disk
    parts = [
        f"layout {facts.digest}: {found.lookups} lookups of {found.asked} blocks in {window_s:g} s, found "
        f"{_share(found.rate(found.host))} in memory, {_share(found.rate(found.disk))} on disk",
        f"memory {host.ready} of {host.capacity} blocks, {host.held} held, {host.quarantined} quarantined",
    ]
    if facts.disk is not None:
        why = f" ({facts.disk.reason})" if facts.disk.reason else ""
        parts.append(f"disk {facts.disk.state}{why}, {disk.ready} of {disk.capacity} blocks")
    open_tickets = tickets.stores + tickets.fetches + tickets.expired
    parts.append(f"{tickets.owners} engines, {open_tickets} tickets")
    return "; ".join(parts)


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"
