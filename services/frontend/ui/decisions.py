"""What routers remember of a request, as the page shows it. Pure.

The page names requests by the first digits of their ids (`shared.request_names`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from shared.messages.people import Explanation, Explanations
from shared.request_names import short_name

DECISIONS_SHOWN = 20


class Decisions(Struct, frozen=True):
    """The choices for one request, oldest first: its attempts, and of several choices of a body each."""

    decisions: list[Explanation]
    left_out: int
    routers: int
    """The number of routers that answered."""
    silent: int
    """The number of routers that did not answer in time, or were not asked because there are too many."""


def merged(answers: Iterable[Explanations], asked: int) -> Decisions:
    """Return the answers of all routers as one. `asked` is how many routers there are."""
    heard = list(answers)
    found = sorted((one for answer in heard for one in answer.decisions), key=lambda one: -one.age_s)
    shown = [replace(one, request=short_name(one.request)) for one in found[-DECISIONS_SHOWN:]]
    return Decisions(shown, len(found) - len(shown), len(heard), asked - len(heard))
