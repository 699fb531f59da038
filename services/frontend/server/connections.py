"""Tracks client connections and decides which of them to close. Pure. A connection is any hashable key; time is an
argument.

    add ──▶ idle ──bytes──▶ header ──request begins──▶ busy ──request ends──▶ idle
             │ idle_s          │ header_s: answered with 408              remove: from any state
             ▼                 ▼
           closed            closed

At the limit, the connection that has been idle longest makes room for a new one if it has been idle for at least
EVICTABLE_AFTER_S. Otherwise the new connection is refused. So idle connections never keep an active client out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Literal, TypeVar

EVICTABLE_AFTER_S = 1.0
"""Seconds; a connection that became idle more recently may be about to send its next request."""

CloseReason = Literal["idle", "header", "room"]
"""Why a connection is closed: it was idle too long, its request's header came too slowly, or a new one needs room."""

C = TypeVar("C", bound=Hashable)


class Connections(Generic[C]):
    """All connections of one listening process. `now` is seconds on a monotonic clock."""

    def __init__(self, *, limit: int, idle_s: float, header_s: float) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._header_s = header_s
        self._idle: dict[C, float] = {}
        """Connection → when it became idle, in that order."""
        self._header: dict[C, float] = {}
        """Connection → when the first bytes of a request's header came, in that order."""
        self._busy: set[C] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._header) + len(self._busy)

    @property
    def idle(self) -> list[C]:
        """The connections without a request; the one that has been idle longest comes first."""
        return list(self._idle)

    def to_evict(self, now: float) -> C | None:
        """Return the connection to close so that a new one fits. None if there is room, or no connection may be closed;
        `full` tells which."""
        if len(self) < self._limit or not self._idle:
            return None
        longest, since = next(iter(self._idle.items()))
        return longest if now - since >= EVICTABLE_AFTER_S else None

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return len(self) >= self._limit

    def add(self, connection: C, now: float) -> None:
        """Add a new, idle connection. There must be room for it."""
        assert not self.full
        self._idle[connection] = now

    def bytes_received(self, connection: C, now: float) -> None:
        """Record that bytes came; on an idle connection they begin a request's header."""
        if self._idle.pop(connection, None) is not None:
            self._header[connection] = now

    def request_began(self, connection: C) -> None:
        """Record that a request's header is complete."""
        if self._discard(connection):
            self._busy.add(connection)

    def request_ended(self, connection: C, now: float) -> None:
        """Record that the connection's request has been answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = now

    def remove(self, connection: C) -> None:
        """Forget a connection, whichever side closed it; idempotent."""
        self._discard(connection)

    def pop_overdue(self, now: float) -> Iterator[tuple[C, CloseReason]]:
        """Remove and yield the connections that have waited too long."""
        states: tuple[tuple[dict[C, float], float, CloseReason], ...]
        states = (self._idle, self._idle_s, "idle"), (self._header, self._header_s, "header")
        for waiting, limit_s, why in states:
            while waiting:
                connection, since = next(iter(waiting.items()))
                if now - since < limit_s:
                    break
                del waiting[connection]
                yield connection, why

    def _discard(self, connection: C) -> bool:
        """Remove the connection from its state; return whether it had one."""
        if connection in self._busy:
            self._busy.remove(connection)
            return True
        return self._idle.pop(connection, None) is not None or self._header.pop(connection, None) is not None

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self) <= self._limit
        assert len({*self._idle, *self._header, *self._busy}) == len(self), "a connection is in two states"
        for waiting in (self._idle, self._header):
            since = list(waiting.values())
            assert since == sorted(since)
