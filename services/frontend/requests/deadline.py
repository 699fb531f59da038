"""How long a request may take: what its client asks for, within the limits of the server. Pure.

The client uses the header Headrace-Deadline-S (HTTP and NATS) or the field deadline_s of the body. The smaller of both
counts, and the server's default without either.
"""

from __future__ import annotations

import re

from msgspec import Struct

from services.frontend.config import LimitsConfig
from services.frontend.protocol.errors import field_error

HEADER = "Headrace-Deadline-S"
FIELD = "deadline_s"

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
    asked = [] if field is None else [_within(field, FIELD, limits)]
    if header is not None:
        if not _NUMBER.fullmatch(header):
            raise field_error(HEADER, f"{header[:64]!r} is not a number of seconds, such as 60 or 0.5")
        asked.append(_within(float(header), HEADER, limits))
    return min(asked, default=limits.deadline_s)


def _within(seconds: float, name: str, limits: LimitsConfig) -> float:
    if not 0 < seconds <= limits.deadline_most_s:
        bounds = f"more than 0 and at most {limits.deadline_most_s:g} seconds"
        raise field_error(name, f"a deadline of {seconds:g} s; it must be {bounds}")
    return seconds
