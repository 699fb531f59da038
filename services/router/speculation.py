"""Blocks that a routed prompt will leave where it was sent, until events confirm them or time is up. Pure.

A burst of siblings comes faster than events do: without this each would find the cache empty and be spread. The
blocks are stored once more in the candidate's own slot, so a real event that stores them too only makes them stay.
For candidates that send no events this is the router's whole knowledge of them, and it is kept longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.router.index import Index, Slot


class Speculation:
    """What was inserted and is not yet expired; at the limit the oldest goes early."""

    def __init__(self, index: Index, *, ttl_s: float, limit_blocks: int) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._limit_blocks = limit_blocks
        self._entries: deque[tuple[float, Slot, Sequence[int]]] = deque()
        """(expires, slot, hashes), soonest first."""
        self.blocks = 0

    def add(self, slot: Slot, hashes: Sequence[int], now_s: float) -> None:
        """These will soon be held in the slot's device tier."""
        if self._ttl_s <= 0 or not hashes or len(hashes) > self._limit_blocks:
            return
        while self.blocks + len(hashes) > self._limit_blocks:
            self._drop_first()
        self._index.stored(slot, 0, hashes)
        self._entries.append((now_s + self._ttl_s, slot, hashes))
        self.blocks += len(hashes)

    def expire(self, now_s: float, *, blocks: int) -> bool:
        """Drop what is due, about so many blocks at most; whether more is due."""
        while self._entries and self._entries[0][0] <= now_s:
            if blocks <= 0:
                return True
            blocks -= self._drop_first()
        return False

    def _drop_first(self) -> int:
        _, slot, hashes = self._entries.popleft()
        self._index.removed(slot, 0, hashes)
        self.blocks -= len(hashes)
        return len(hashes)

    def validate(self) -> None:
        """Assert every invariant."""
        assert self.blocks == sum(len(hashes) for _, _, hashes in self._entries) <= self._limit_blocks
        times = [expires for expires, _, _ in self._entries]
        assert times == sorted(times)
