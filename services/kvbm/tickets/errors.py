"""Why a worker's request to the block store was not done. Each has the code with which it crosses the wire. Pure.

Refusal
├── BadRequest      a key of a wrong length, too many blocks, slots that were not granted, a ticket of the other kind
├── UnknownOwner    attach first: this owner never did, or it was proven dead, or the store was restarted since
├── UnknownTicket   it has ended already, or it is another owner's
├── TicketExpired   the commit came after the deadline; nothing was published, and the slots are the store's again
├── TooManyTickets  the owner has as many open as it may have
├── TooManyOwners   as many engines are attached as may be
├── WrongLayout     the owner is attached to another layout
├── ArenaMissing    no arena is free, or a block is larger than one
└── NotReady        the pool's memory is not there yet, or it cannot be told whether the owner lives

A refused request has changed nothing, with one exception: who is told `TicketExpired` has thereby said that it does not
write any more, which ends the quarantine of the ticket's slots.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from shared.errors import HeadraceError

RefusalCode = Literal[
    "bad_request", "unknown_owner", "unknown_ticket", "expired", "wrong_layout", "no_arena", "full", "not_ready"
]


class Refusal(HeadraceError):
    """Any of them."""

    code: ClassVar[RefusalCode]


class BadRequest(Refusal):
    """The request contradicts itself or what was agreed."""

    code = "bad_request"


class UnknownOwner(Refusal):
    """The owner has to attach first."""

    code = "unknown_owner"

    def __init__(self, owner: str, problem: str = "is not attached") -> None:
        super().__init__(f"owner {owner!r} {problem}")
        self.owner = owner


class UnknownTicket(Refusal):
    """The owner has no such ticket."""

    code = "unknown_ticket"

    def __init__(self, owner: str, ticket: int) -> None:
        super().__init__(f"owner {owner!r} has no ticket {ticket}")
        self.owner = owner
        self.ticket = ticket


class TicketExpired(Refusal):
    """A commit that came too late."""

    code = "expired"

    def __init__(self, owner: str, ticket: int) -> None:
        super().__init__(f"ticket {ticket} of owner {owner!r} has expired; nothing was published")
        self.owner = owner
        self.ticket = ticket


class TooManyTickets(Refusal):
    """The owner has to end some of its tickets first."""

    code = "full"

    def __init__(self, owner: str, limit: int) -> None:
        super().__init__(f"owner {owner!r} has {limit} tickets open, the most it may have")
        self.owner = owner
        self.limit = limit


class TooManyOwners(Refusal):
    """An engine has to end before another one can attach."""

    code = "full"


class WrongLayout(Refusal):
    """An engine process has blocks of one layout, for as long as it lives."""

    code = "wrong_layout"


class ArenaMissing(Refusal):
    """The layout has no place in the pool."""

    code = "no_arena"


class NotReady(Refusal):
    """Later, perhaps."""

    code = "not_ready"
