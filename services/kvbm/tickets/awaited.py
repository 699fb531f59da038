"""Blocks that fetches await: another engine is about to store them. Pure.

    fetch: nothing is there after the prefix ──▶ add ──the next block is published: it is held──▶ replace ─┐
                                                  ▲ │                                                      │
                                                  └─┼──────────────── more are awaited ◀───────────────────┘
                                                    └── the fetch has ended ──▶ remove

A fetch needs its blocks in order, so it waits for one block at a time: the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from shared.hashing import ContentKey

AWAITED_MOST = 65_536
"""The most blocks that all fetches of one layout may await together. A fetch beyond that awaits nothing."""


class AwaitedBlocks:
    """What the open fetches of one layout await."""

    def __init__(self) -> None:
        self._keys: dict[int, Sequence[ContentKey]] = {}
        """Ticket → the awaited blocks, in order; never empty."""
        self._next: dict[ContentKey, set[int]] = {}
        """Block → the tickets that wait for it as their next one; never empty."""
        self._counts: Counter[ContentKey] = Counter()
        self._total = 0
        """Their sum: a fetch asks for it at each commit of its blocks."""

    def __contains__(self, key: object) -> bool:
        """Whether any fetch awaits the block."""
        return key in self._counts

    def keys(self, ticket: int) -> Sequence[ContentKey]:
        """Return what a ticket awaits, in order."""
        return self._keys.get(ticket, ())

    def has_room(self, blocks: int) -> bool:
        """Return whether as many further blocks may be awaited."""
        return self._total + blocks <= AWAITED_MOST

    def waiting_for(self, key: ContentKey) -> Collection[int]:
        """Return the tickets whose next block this is, ascending."""
        return sorted(self._next.get(key, ()))

    def replace(self, ticket: int, keys: Sequence[ContentKey]) -> None:
        """From now on, the ticket awaits these blocks, in order; none if empty."""
        before = self._keys.pop(ticket, ())
        self._total += len(keys) - len(before)
        if before:
            waiting = self._next[before[0]]
            waiting.discard(ticket)
            if not waiting:
                del self._next[before[0]]
            for key in before:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
        if keys:
            self._keys[ticket] = keys
            self._next.setdefault(keys[0], set()).add(ticket)
            self._counts.update(keys)

    def validate(self, tickets: Collection[int]) -> None:
        """Raise AssertionError if this contradicts itself or the open fetches."""
        assert self._keys.keys() <= set(tickets), "a fetch has ended and awaits blocks"
        assert all(self._keys.values()), "a fetch awaits nothing"
        assert self._counts == Counter(key for keys in self._keys.values() for key in keys), "blocks are counted wrong"
        expected: dict[ContentKey, set[int]] = {}
        for ticket, keys in self._keys.items():
            expected.setdefault(keys[0], set()).add(ticket)
        assert self._next == expected, "a fetch waits for another block than its next one"
        assert self._counts.total() == self._total <= AWAITED_MOST, "too many blocks are awaited"
