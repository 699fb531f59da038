"""Remembers which servers gave no answer to the latest requests, so that fewer try them. Pure.

    trusted ── FAULTS in a row ──▶ suspected ── every PAUSE_S ──▶ one request may try it
       ▲                                                             │
       └────────────────────────── it answers ◀──────────────────────┘

A server may say that it is healthy and answer nothing, and what it is asked again for stays with it, since routers
believe that it has the prompt's beginning. A suspected server is asked all the same if there is no other one.
"""

from __future__ import annotations

from msgspec import Struct

FAULTS = 3
"""Requests in a row without an answer after which a server is suspected."""
PAUSE_S = 5.0
"""Seconds between two requests that try a suspected server."""
HANGS_S = 30.0
"""Seconds without a byte after which a stream that is given up counts as without an answer."""
SERVERS_LIMIT = 1024
"""Most servers that are remembered; at the limit the one whose last fault is oldest is forgotten."""


class _Faults(Struct):
    """The faults of one server since its last answer."""

    count: int = 0
    again_s: float = 0.0
    """When a request may try it."""


class ServerSuspects:
    """The servers that gave no answer last, by their instances. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._faults: dict[str, _Faults] = {}
        """In the order of their last faults."""

    def fault(self, instance: str, now_s: float) -> None:
        """Note a request without an answer."""
        faults = self._faults.pop(instance, None) or _Faults()
        faults.count += 1
        faults.again_s = now_s + PAUSE_S
        self._faults[instance] = faults
        if len(self._faults) > SERVERS_LIMIT:
            del self._faults[next(iter(self._faults))]

    def answered(self, instance: str) -> None:
        """Note an answer."""
        self._faults.pop(instance, None)

    def passed_over(self, now_s: float) -> list[str]:
        """Return the servers that a request should not try. It may try each that is due, and others wait again."""
        suspected = []
        for instance, faults in self._faults.items():
            if faults.count < FAULTS:
                continue
            if faults.again_s <= now_s:
                faults.again_s = now_s + PAUSE_S
            else:
                suspected.append(instance)
        return suspected

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._faults) <= SERVERS_LIMIT
        assert all(faults.count > 0 for faults in self._faults.values())
