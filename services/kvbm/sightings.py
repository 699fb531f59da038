"""Sightings: how often each block was seen lately, whether or not any tier has it (pure).

A block is worth a write to disk when it was seen twice: most prompts come once. Counts stop at `ENOUGH`; of more keys
than the limit the ones seen longest ago are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.hashing import ContentKey

ENOUGH = 15


class Sightings:
    """Bounded in keys: about 200 bytes each."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self._limit = limit
        self._counts: OrderedDict[ContentKey, int] = OrderedDict()
        """Seen longest ago first."""

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, key: ContentKey) -> int:
        """How often it was seen; 0: never, or too long ago."""
        return self._counts.get(key, 0)

    def see(self, key: ContentKey) -> int:
        """Once more; how often it was seen, this one counted."""
        counts = self._counts
        count = min(counts.get(key, 0) + 1, ENOUGH)
        counts[key] = count
        counts.move_to_end(key)
        if len(counts) > self._limit:
            counts.popitem(last=False)
        return count
