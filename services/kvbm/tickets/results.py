"""What `Tickets` returns to its shell, and the limits it keeps to. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.kvbm.tiers.actions import TierStatistics
from shared.pool.socket_frames import MOST_REQUEST_BLOCKS


class TicketLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """How long tickets last, and how much one owner may have: the table `tickets` of the settings."""

    store_time_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds that an engine has for copying to its slots and for Commit."""
    fetch_time_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds that an engine may read after a Fetch; they start again when more of the prefix has come from disk."""
    tickets_per_owner: Annotated[int, Meta(ge=1)] = 256
    """The number of tickets that one engine may have open, including expired ones
    that wait for the engine's answer."""
    blocks_per_request: Annotated[int, Meta(ge=1, le=MOST_REQUEST_BLOCKS)] = 4096
    """The number of blocks that one Store, Fetch or Discard may have. At most 32,768: more do not fit a frame of the
    socket."""
    owner_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of the slots that one engine may be writing to, including quarantined ones; at least one slot."""


class FetchProgress(Struct, frozen=True):
    """Progress of a fetch that waits for the disk or awaits blocks: more slots can be read, or the prefix is shorter,
    or both. If `found` is 0 the ticket has ended."""

    owner: str
    ticket: int
    time_left_s: float
    first: int
    """The index of the first of `slots` in the prefix."""
    slots: list[int]
    from_disk: list[bool]
    """For each of `slots`, whether its block came from disk."""
    found: int
    """The length of the prefix as it is known now, with the blocks that are awaited."""


class ExpiredTicket(Struct, frozen=True):
    """A ticket whose deadline has come."""

    owner: str
    ticket: int
    kind: Literal["store", "fetch"]
    slots: list[int]
    """A store's slots are quarantined now, a fetch's are no longer held."""


class TicketStatistics(Struct, frozen=True):
    """Counts of owners and tickets, now."""

    owners: int
    stores: int
    fetches: int
    expired: int
    """Expired stores that wait for their owners."""
    awaited: int
    """Engines of a former kvbm that have neither attached again nor died; the startup quarantine waits for them."""
    tiers: TierStatistics
