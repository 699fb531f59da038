"""Describes a layout and its blocks for people: as a Struct, as a line of the log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from services.kvbm.metrics import EvictionReason
from services.kvbm.tickets.results import TicketStatistics
from services.kvbm.tiers.actions import TierEvent
from services.kvbm.tiers.disk_records import DiskStatistics
from services.kvbm.tiers.hit_window import LookupCounts
from shared.blocks import Content, ContentStored
from shared.hashing import ContentKey
from shared.messages.control import Note
from shared.messages.kv_events import Tier
from shared.messages.kvbm import LayoutState, StoreLayout, TierState
from shared.notes import NoteLog

BLOCK_NOTES = 8192
"""Most notes of one layout: 2 MB."""
_STORED: dict[Tier, str] = {"host": "stored in host memory", "disk": "written to disk"}
_EVICTED: dict[tuple[Tier, EvictionReason], str] = {
    ("host", "room"): "evicted from host memory: the policy chose it to make room",
    ("disk", "room"): "evicted from disk: the policy chose it to make room",
    ("host", "discarded"): "discarded from host memory: an engine found that it may be wrong",
    ("disk", "discarded"): "discarded from disk: an engine found that it may be wrong",
    ("host", "lost"): "discarded from host memory: its bytes were damaged",
    ("disk", "lost"): "lost on disk: the record does not have its bytes",
    ("host", "disk gone"): "evicted from host memory: the disk has failed",
    ("disk", "disk gone"): "no longer on disk: the disk has failed",
}


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


class LayoutNotes:
    """Times are seconds on the loop's clock."""

    def __init__(self) -> None:
        self._log: NoteLog[ContentKey] = NoteLog(BLOCK_NOTES)

    def changed(self, events: Iterable[TierEvent], why: EvictionReason, now_s: float) -> None:
        """Note blocks that can be found from now on, or no longer."""
        for tier, event in events:
            text = _STORED[tier] if isinstance(event, ContentStored) else _EVICTED[tier, why]
            self._log.add(event.content.key, text, now_s)

    def declined(self, contents: Sequence[Content], indices: Iterable[int], why: str, now_s: float) -> None:
        """Note blocks that an engine offered and that got no slot."""
        for index in indices:
            self._log.add(contents[index].key, "offered by an engine and not taken: {}", now_s, name=why)

    def find(self, key_end: bytes, now_s: float) -> list[Note]:
        """Return the notes about a block, by the end of its key, oldest first."""
        return self._log.find(lambda key: key.endswith(key_end), now_s)
