"""A line of blocks that may have to go, the first in line first. Pure.

                       refused                    each `first` asks two of them again
    push ──▶ waiting ───────────▶ aside ─────────────────────────────────────────────▶ named, if it may go by now
              ▲                     │
              └──────── push ───────┘

Some may not go just now: they are being copied, or their children are still there. Those are passed once, and then
stand aside, so that thousands of them before the one that may go are not asked again for each victim. Every operation
is O(1), amortised, but for `first(…, every=True)` where all have been refused.
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
        """Refused, all of them longer in line than those that wait; who was asked last is last."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._refused)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._waiting or key in self._refused

    def push(self, key: ContentKey) -> None:
        """To the end, from wherever it is."""
        self._refused.pop(key, None)
        self._waiting[key] = None
        self._waiting.move_to_end(key)

    def remove(self, key: ContentKey) -> None:
        """It must be there."""
        if key in self._refused:
            del self._refused[key]
        else:
            del self._waiting[key]

    def first(self, may_go: Callable[[ContentKey], bool], *, every: bool) -> ContentKey | None:
        """One that may go, about the first in line; it stays. Unless `every` is set, one may be missed that was refused
        before."""
        if not self._waiting and not self._refused:  # as most lines of a policy that has many are
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
        """Raises AssertionError where the line contradicts itself. O(length)."""
        assert self._waiting.keys().isdisjoint(self._refused), "a key is in line twice"
