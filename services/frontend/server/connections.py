"""Which client connections there are, and which of them must go. Pure. The clock is an argument, a connection any key.

    opened ──▶ idle ──bytes──▶ heading ──a whole head──▶ busy ──answered──▶ idle
                │ idle_s          │ header_s: told 408                 gone: from any state
                ▼                 ▼
              closed            closed

At the limit the connection that has been idle longest makes room for a new one, if that was SPARED_S or longer; else
the new one is turned away. So idle connections, however many, keep nobody out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Literal, TypeVar

EVICTABLE_AFTER_S = 1.0
"""Who became idle more lately may be about to ask again."""

CloseReason = Literal["idle", "header", "room"]
"""Why a connection was closed: idle too long, slow with a request's head, or to make room."""

C = TypeVar("C", bound=Hashable)


class Connections(Generic[C]):
    """Those of one listening process. `now` is seconds on a clock that only grows."""

    def __init__(self, *, limit: int, idle_s: float, header_s: float) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._header_s = header_s
        self._idle: dict[C, float] = {}
        """Since when; the longest first."""
        self._heading: dict[C, float] = {}
        """The same."""
        self._busy: set[C] = set()

    def __len__(self) -> int:
        return len(self._idle) + len(self._heading) + len(self._busy)

    @property
    def idle(self) -> list[C]:
        """Those without a request, the longest first."""
        return list(self._idle)

    def to_evict(self, now: float) -> C | None:
        """Whom to close so that one more fits; None: nobody is to go. `full` tells whether one more may come then."""
        if len(self) < self._limit or not self._idle:
            return None
        longest, since = next(iter(self._idle.items()))
        return longest if now - since >= EVICTABLE_AFTER_S else None

    @property
    def full(self) -> bool:
        """One more would be one too many."""
        return len(self) >= self._limit

    def add(self, one: C, now: float) -> None:
        """A new one, for which there is room."""
        assert not self.full
        self._idle[one] = now

    def bytes_received(self, one: C, now: float) -> None:
        """Bytes came: where it was idle, those of a request's head."""
        if self._idle.pop(one, None) is not None:
            self._heading[one] = now

    def request_began(self, one: C) -> None:
        """A request's head is whole."""
        if self._forget(one):
            self._busy.add(one)

    def request_ended(self, one: C, now: float) -> None:
        """Its request has ended."""
        if one in self._busy:
            self._busy.remove(one)
            self._idle[one] = now

    def remove(self, one: C) -> None:
        """It is closed, by whomever; idempotent."""
        self._forget(one)

    def pop_overdue(self, now: float) -> Iterator[tuple[C, CloseReason]]:
        """Those that have waited too long; each is gone with this."""
        for waiting, limit_s, why in self._waiting():
            while waiting:
                one, since = next(iter(waiting.items()))
                if now - since < limit_s:
                    break
                del waiting[one]
                yield one, why

    def _waiting(self) -> tuple[tuple[dict[C, float], float, CloseReason], ...]:
        return (self._idle, self._idle_s, "idle"), (self._heading, self._header_s, "header")

    def _forget(self, one: C) -> bool:
        """Whether it was there."""
        if one in self._busy:
            self._busy.remove(one)
            return True
        return self._idle.pop(one, None) is not None or self._heading.pop(one, None) is not None

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self) <= self._limit
        assert len({*self._idle, *self._heading, *self._busy}) == len(self), "in one state each"
        for waiting in (self._idle, self._heading):
            since = list(waiting.values())
            assert since == sorted(since)
