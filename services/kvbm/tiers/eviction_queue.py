"""A queue of blocks to evict, in order. Pure.

                       refused                    each `first` asks two of them again
    push ──▶ waiting ───────────▶ refused ───────────────────────────────────────────▶ returned, once it may go
              ▲                     │
              └──────── push ───────┘

Some blocks may not go just now, because they are being copied. `first` asks for such a block once
and then sets it aside, so that it does not ask again for thousands of blocks before the one that may go. Every
operation is O(1), amortised, except for `first(…, every=True)` where all have been refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from shared.hashing import ContentKey

_ASKED_AGAIN = 2


class EvictionQueue:
    """Keys in order, each once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[ContentKey, None] = OrderedDict()
        self._refused: OrderedDict[ContentKey, None] = OrderedDict()
        """Refused keys, all of them older than those that wait; the key that was asked for last comes last."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._waiting or key in self._refused

    def push(self, key: ContentKey) -> None:
        """Move the key to the end, or add it there."""
        self._refused.pop(key, None)
        self._waiting[key] = None
        self._waiting.move_to_end(key)

    def remove(self, key: ContentKey) -> None:
        """Remove a key, which must be in the queue."""
        if key in self._refused:
            del self._refused[key]
        else:
            del self._waiting[key]

    def first(self, may_go: Callable[[ContentKey], bool], *, every: bool) -> ContentKey | None:
        """Return one key that may go, close to the first in the queue; it stays in it. Unless `every` is set, a key
        that was refused before may be missed."""
        if not self._waiting and not self._refused:  # most queues of a policy that has many are empty
            return None
        for _ in range(min(_ASKED_AGAIN, len(self._refused))):
            key = next(iter(self._refused))
            if may_go(key):
                return key
            self._refused.move_to_end(key)
        while self._waiting:
            key = next(iter(self._waiting))
            if may_go(key):
                return key
            del self._waiting[key]
            self._refused[key] = None
        return next(filter(may_go, self._refused), None) if every else None

    def validate(self) -> None:
        """Raise AssertionError if the queue contradicts itself. O(length)."""
        assert self._waiting.keys().isdisjoint(self._refused), "a key is in the queue twice"
