"""The header `traceparent`, as clients send it and as services pass it on, and which requests are traced. Pure.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
    │  trace: 32 hex digits              parent: 16       └ flags; bit 0: the caller's own spans are recorded
    └ version

The format is that of W3C's Trace Context, level 2. A header that breaks it is refused as a whole, so that the request
gets a trace of its own: nothing of such a header goes on to other services, to logs or to the collector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

HEADER = "traceparent"
SPELLINGS = (HEADER, "Traceparent")
"""How clients of NATS, whose headers are case-sensitive, may write it."""
LIMIT_CHARACTERS = 256
"""The maximum length of a header. That of version 00 has 55; later versions may append fields."""

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class TraceParent(Struct, frozen=True):
    """A place in a trace: what is caused from here has `span` as its parent."""

    trace: str
    """The trace's id: 32 hex digits."""
    span: str
    """The span's id: 16 hex digits."""
    sampled: bool = True
    """Whether the caller records its own spans."""

    @property
    def header(self) -> str:
        """The value of the header."""
        return f"00-{self.trace}-{self.span}-{int(self.sampled):02x}"

    @property
    def headers(self) -> dict[str, str]:
        """The header, for a message or an answer."""
        return {HEADER: self.header}


def parse(given: Sequence[str]) -> TraceParent | None:
    """Return the place that a caller's headers name; None if there is not exactly one header, or if it is malformed."""
    if len(given) != 1 or len(given[0]) > LIMIT_CHARACTERS:
        return None
    found = _FORM.fullmatch(given[0])
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "00" and more is not None:
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & _SAMPLED))


def carried(headers: Mapping[str, str]) -> TraceParent | None:
    """Return the place that a service's message carries: only messages of traced requests have one."""
    value = headers.get(HEADER)
    return None if value is None else parse((value,))


def of_client(headers: Mapping[str, str]) -> list[str]:
    """Return all traceparents in the headers of a message of a NATS client."""
    return [headers[name] for name in SPELLINGS if name in headers]


class DoorSampler:
    """Decides at the door which requests are traced. `now_s` is on any clock that does not go back.

        the client's header          `trace.clients` = "follow"             "ignore"
        none, or malformed           drawn: one in 1 / `trace.sample`       drawn
        sampled                      traced, `clients_per_s` at most;       drawn
                                     those beyond are drawn
        not sampled                  not traced                             drawn

    Clients that ask for traces cost the services as much as they ask for, hence the bound.
    """

    def __init__(self, sample: float, clients: Literal["follow", "ignore"], clients_per_s: float) -> None:
        self._sample = sample
        self._follows = clients == "follow"
        self._per_s = clients_per_s
        self._most = max(1.0, clients_per_s)
        self._left = self._most if clients_per_s > 0 else 0.0
        self._counted_s = float("-inf")

    def decide(self, given: TraceParent | None, drawn: float, now_s: float) -> bool:
        """Return whether a request is traced. `drawn` is a random number, 0 ≤ drawn < 1."""
        if given is not None and self._follows:
            if not given.sampled:
                return False
            if self._take(now_s):
                return True
        return drawn < self._sample

    def _take(self, now_s: float) -> bool:
        """Take one of the traces that clients may ask for."""
        if self._counted_s > float("-inf"):
            self._left = min(self._most, self._left + max(0.0, now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
