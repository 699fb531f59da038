"""The turns of API keys at a few places that all of them share. Pure.

    join ──▶ waiting ──pop──▶ served ──end──▶ gone       leave: gives up waiting
             one line a key     at most `places`

The keys take turns, however many requests each has in its line. A key whose last turn took too much is *slow*: it comes
after all that are not, and slow keys together never hold the last place if there are several. So one that only sends
what takes long keeps the others waiting for what is served already, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

W = TypeVar("W")


class Turns(Generic[W]):
    """The lines before some places. Requests without an API key share the line of the empty name."""

    def __init__(self, places: int, own: int) -> None:
        """Create it with this many places, of which one key may hold `own`; both are at least one."""
        assert places > 0
        assert own > 0
        self._places = places
        self._own = own
        self._lines: dict[str, deque[W]] = {}
        """The waiting of each key; the key whose turn comes next is the first."""
        self._served: dict[str, int] = {}
        """How many places each key holds."""
        self._slow: set[str] = set()
        """The keys whose last turn took too much."""

    def join(self, key: str, waiting: W) -> None:
        """Put one at the end of its key's line."""
        self._lines.setdefault(key, deque()).append(waiting)

    def leave(self, key: str, waiting: W) -> None:
        """Take one out of its line that gives up waiting."""
        self._lines[key].remove(waiting)
        if not self._lines[key]:
            del self._lines[key]

    def pop(self) -> Iterator[W]:
        """Give the free places away, and yield those that get one."""
        while (key := self._next()) is not None:
            line = self._lines.pop(key)
            self._served[key] = self._served.get(key, 0) + 1
            yield line.popleft()
            if line:
                self._lines[key] = line  # at the end

    def _next(self) -> str | None:
        """Return the key whose turn it is; None if no place is free or none may have it."""
        if sum(self._served.values()) >= self._places:
            return None
        ready = [key for key in self._lines if not key or self._served.get(key, 0) < self._own]
        for key in ready:
            if key not in self._slow:
                return key
        held = sum(count for key, count in self._served.items() if key in self._slow)
        return next(iter(ready), None) if held < max(1, self._places - 1) else None

    def is_slow(self, key: str) -> bool:
        """Return whether the key's last turn took too much."""
        return key in self._slow

    def end(self, key: str, *, too_much: bool = False) -> None:
        """Give one of a key's places back; `too_much`: what it was used for took too much."""
        self._served[key] -= 1
        if not self._served[key]:
            del self._served[key]
        if too_much and key:
            self._slow.add(key)
        else:
            self._slow.discard(key)

    def validate(self) -> None:
        """Assert every invariant."""
        assert all(self._lines.values())
        assert all(count > 0 for count in self._served.values())
        assert sum(self._served.values()) <= self._places
        assert all(count <= self._own for key, count in self._served.items() if key)
        assert "" not in self._slow
