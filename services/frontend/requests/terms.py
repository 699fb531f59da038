"""The terms of a request: its deadline, and its priority. Pure.

Both are what its client asks for, within what the server or its API key allows.

The client asks for a deadline in the header Headrace-Deadline-S (HTTP and NATS) or the field deadline_s of the body.
The smaller of both counts, and the server's default without either.
"""

from __future__ import annotations

import re

from msgspec import Struct

from services.frontend.auth.accounts import Account
from services.frontend.config import LimitsConfig
from services.frontend.protocol.errors import field_error

DEADLINE_HEADER = "Headrace-Deadline-S"
DEADLINE_FIELD = "deadline_s"

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class RequestDeadline(Struct, frozen=True):
    """The time at which a request fails if it has not ended."""

    at: float
    """The time on the loop's clock."""
    shortened: bool
    """Whether `at` is sooner than the server's default."""


def deadline_of(field: float | None, header: str | None, received_s: float, limits: LimitsConfig) -> RequestDeadline:
    """Return the deadline of a request whose body was complete at `received_s` on the loop's clock. Raise
    InvalidRequest that names the field or the header."""
    allowed = allowed_s(field, header, limits)
    return RequestDeadline(received_s + allowed, shortened=allowed < limits.deadline_s)


def allowed_s(field: float | None, header: str | None, limits: LimitsConfig) -> float:
    """Return the seconds from the complete body to the deadline; `field` is positive. Raise InvalidRequest that names
    the field or the header."""
    asked = [] if field is None else [_within(field, DEADLINE_FIELD, limits)]
    if header is not None:
        if not _NUMBER.fullmatch(header):
            raise field_error(DEADLINE_HEADER, f"{header[:64]!r} is not a number of seconds, such as 60 or 0.5")
        asked.append(_within(float(header), DEADLINE_HEADER, limits))
    return min(asked, default=limits.deadline_s)


def _within(seconds: float, name: str, limits: LimitsConfig) -> float:
    if not 0 < seconds <= limits.deadline_most_s:
        bounds = f"more than 0 and at most {limits.deadline_most_s:g} seconds"
        raise field_error(name, f"a deadline of {seconds:g} s; it must be {bounds}")
    return seconds


PRIORITY_NOT_ALLOWED = "priority_not_allowed"
"""The code of the error about a priority that the client may not ask for."""


def lowest_allowed(account: Account | None, default: int) -> int:
    """Return the lowest value of the field that a client may send: that of its key, or the default."""
    own = None if account is None else account.entry.min_priority
    return default if own is None else own


def served_priority(asked: int | None, lowest: int) -> int:
    """Return a request's priority as routers and workers count it. A client that asks for none gets 0, or the best that
    it may have. Raise InvalidRequest if it asks for a better one than it may have.

        the body's `priority`            lower is served earlier, as in vLLM; 0 by default
        Select, Generate and Submit      higher is served earlier: the negative of it

    A value that is too early is refused, not raised: its client would never learn why it waits. Nothing ages;
    `limits.wait_s` bounds the wait of what no worker has begun.
    """
    if asked is None:
        return -max(0, lowest)
    if asked < lowest:
        why = f"{asked} is lower than {lowest}, the lowest that you may ask for; lower is served earlier"
        raise field_error("priority", why, PRIORITY_NOT_ALLOWED)
    return -asked
