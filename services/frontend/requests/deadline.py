"""How long a request may take: what its client asks for, within what the server allows. Pure.

Header Headrace-Deadline-S (HTTP and NATS), or the body's field deadline_s; of both the smaller, of neither the default.
"""

from __future__ import annotations

import re

from msgspec import Struct

from services.frontend.config import LimitsConfig
from shared.errors import InvalidRequest

HEADER = "Headrace-Deadline-S"
FIELD = "deadline_s"

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Deadline(Struct, frozen=True):
    """Of one request."""

    at: float
    """On the loop's clock."""
    shortened: bool
    """It is sooner than the server's own."""


def deadline_of(field: float | None, header: str | None, begun: float, limits: LimitsConfig) -> Deadline:
    """`begun`: when the body was there, on the loop's clock. Raises InvalidRequest, naming field or header."""
    allowed = allowed_s(field, header, limits)
    return Deadline(begun + allowed, shortened=allowed < limits.deadline_s)


def allowed_s(field: float | None, header: str | None, limits: LimitsConfig) -> float:
    """Seconds from the moment the body is there. `field` is positive. Raises InvalidRequest, naming field or header."""
    asked = [] if field is None else [_within(field, FIELD, limits)]
    if header is not None:
        if not _NUMBER.fullmatch(header):
            raise InvalidRequest(
                f"{HEADER}: {header[:64]!r} is not a number of seconds, such as 60 or 0.5", param=HEADER
            )
        asked.append(_within(float(header), HEADER, limits))
    return min(asked, default=limits.deadline_s)


def _within(seconds: float, name: str, limits: LimitsConfig) -> float:
    if not 0 < seconds <= limits.deadline_most_s:
        bounds = f"more than 0 and at most {limits.deadline_most_s:g} seconds"
        raise InvalidRequest(f"{name}: a deadline of {seconds:g} s; it has to be {bounds}", param=name)
    return seconds
