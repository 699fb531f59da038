"""Why kvbm refuses an engine's request. Each error has the code with which it crosses the wire. Pure.

Refusal
├── BadRequest      a key of a wrong length, too many blocks, slots that were not granted, a ticket of the other kind
├── UnknownOwner    the engine must attach first: it never did, its lock was free, kvbm was restarted, or it attached
│                   through another connection
├── UnknownTicket   the ticket has ended already, or it is another owner's
├── TicketExpired   the commit came after the deadline; nothing was published, and kvbm has the slots back
├── TooManyTickets  the owner has its maximum of tickets open
├── TooManyOwners   the maximum of engines is attached
├── WrongLayout     the owner is attached to another layout
├── ArenaMissing    no arena is free, or a block is larger than an arena
└── NotReady        the pool's memory is not made yet, or the owner's lock cannot be read

A refused request has changed nothing, with one exception. An engine that is refused with `TicketExpired` has shown by
its commit that it has stopped writing, which ends the quarantine of the ticket's slots.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from shared.errors import HeadraceError

RefusalCode = Literal[
    "bad_request", "unknown_owner", "unknown_ticket", "expired", "wrong_layout", "no_arena", "full", "not_ready"
]


class Refusal(HeadraceError):
    """The base of all refusals."""

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
    """The commit came after the ticket's deadline."""

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
    """No arena of the pool is free for the layout, or large enough."""

    code = "no_arena"


class NotReady(Refusal):
    """kvbm cannot serve the request yet; the same request may succeed later."""

    code = "not_ready"
