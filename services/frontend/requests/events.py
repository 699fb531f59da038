"""Events of a session: what can happen to a request, as `session.Session.on` gets it. Pure.

Selected, SelectRefused, Accepted and Refused are the messages themselves.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from services.frontend.requests.retry import Loss
from shared.messages.frames import Part
from shared.messages.generate import Accepted, Refused
from shared.messages.select import Selected, SelectRefused


class Unrouted(Struct, frozen=True):
    """No router answered."""

    attempt: int
    reason: str = "no router answered"
    away: bool = False
    """Whether NATS is disconnected, or seems to be because routers are registered: it may come back soon."""


class AnswerMissed(Struct, frozen=True):
    """A router did not answer in time, and another one is asked. The answer may have been lost."""

    attempt: int


class RetryDue(Struct, frozen=True):
    """The pause of `RetryLater` is over."""

    attempt: int
    now_s: float


class TurnWaited(Struct, frozen=True):
    """The request has waited for the turn of its model, which takes turns with others."""

    attempt: int
    failed: str = ""
    """Why the model is not awake. Empty if it is."""


class Unreachable(Struct, frozen=True):
    """The worker did not listen for Generate, or did not answer in time."""

    attempt: int
    reason: str


class Unsendable(Struct, frozen=True):
    """Generate is too large for the bus."""

    attempt: int
    reason: str


class PartReceived(Struct, frozen=True):
    """A step frame has a part for this request."""

    instance: str
    part: Part


class InstanceGone(Struct, frozen=True):
    """An instance's lease has ended."""

    instance: str


class AttemptLost(Struct, frozen=True):
    """The watchdog found that a streaming attempt brings nothing more: its end was lost, or it makes no progress."""

    attempt: int
    loss: Loss
    reason: str


class StopFound(Struct, frozen=True):
    """The text reached a stop string."""


class ClientLeft(Struct, frozen=True):
    """The client has disconnected."""


class TimeExpired(Struct, frozen=True):
    """A limit of the request's time has passed."""

    limit: Literal["deadline", "first_token"] = "deadline"


Answer = SelectRefused | Unrouted | Accepted | Refused | Unreachable | Unsendable
Event = (
    Selected
    | Answer
    | AnswerMissed
    | TurnWaited
    | RetryDue
    | PartReceived
    | InstanceGone
    | AttemptLost
    | StopFound
    | ClientLeft
    | TimeExpired
)
