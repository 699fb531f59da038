"""What owners are answered, and within which bounds. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.kvbm.tiers.actions import Read, TierEvent, TierStatistics


class TicketLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """How long tickets last, and how much one owner may have: the table `tickets` of the settings."""

    store_time_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    fetch_time_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Begins anew when more of the prefix has come from disk."""
    tickets_per_owner: Annotated[int, Meta(ge=1)] = 256
    """Expired ones that wait for an answer counted."""
    blocks_per_request: Annotated[int, Meta(ge=1)] = 4096
    owner_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Of the slots, that one owner may be writing to, quarantined ones counted; at least one slot."""


class StoreGrant(Struct, frozen=True):
    """A store's answer."""

    ticket: int
    """0: nothing was granted."""
    time_left_s: float
    indices: list[int]
    slots: list[int]
    known: int
    declined: int
    events: list[TierEvent]


class FetchGrant(Struct, frozen=True):
    """A fetch's answer: the whole prefix, of which the first `ready` slots can be read at once."""

    ticket: int
    """0: nothing was found."""
    time_left_s: float
    slots: list[int]
    ready: int
    from_disk: int
    """How many of the slots come from disk."""
    reads: list[Read]
    events: list[TierEvent]


class FetchProgress(Struct, frozen=True):
    """News of a fetch that waits for the disk: more slots can be read, or the prefix is shorter, or both. Where `found`
    is 0 the ticket has ended."""

    owner: str
    ticket: int
    time_left_s: float
    first: int
    """Index of the first of `slots` in the prefix."""
    slots: list[int]
    from_disk: list[bool]
    """Which of these came from disk."""
    found: int
    """Length of the prefix as it is known now."""


class ExpiredTicket(Struct, frozen=True):
    """A ticket's time was over."""

    owner: str
    ticket: int
    kind: Literal["store", "fetch"]
    slots: list[int]
    """A store's are quarantined, a fetch's are held no more."""


class TicketStatistics(Struct, frozen=True):
    """Who holds what, now."""

    owners: int
    stores: int
    fetches: int
    expired: int
    """Stores that wait for their owners' answers."""
    awaited: int
    """Owners from before this store's start whose answers or deaths the first quarantine waits for."""
    tiers: TierStatistics
