"""HandOvers: attempts that only prefill, from their first token until another worker goes on with them. Pure.

    add: the first token was drawn, the blocks were given back
     │
     ▼                take_ended: the kvbm has the blocks, another engine reads them, or they waited long enough
    storing ────────────────────────────────────────────────────────────────────────────────────────────────────▶ ended
     └───── pop: cancelled ─────────────────────────────────────────────────────────────────────────────────────▶ ended

A prompt whose blocks never come to the kvbm is handed over all the same: the other worker computes what it misses.

docs/decisions/0071 gives the reasons.
"""

from __future__ import annotations

from collections.abc import KeysView
from math import inf

from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.scheduler.sequence import Sequence

STORING_MOST_S = 1.0
"""Most seconds for which a prompt that is computed waits until its blocks are stored, before it is handed over; it
waits no longer than it was computed."""


class HandOvers:
    """The attempts of one engine that wait for the kvbm with their first token drawn. None of them holds a block."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._storing: dict[tuple[str, int], tuple[Sequence, float]] = {}
        """The sequences, and when each is handed over though its blocks are not stored."""

    @property
    def names(self) -> KeysView[tuple[str, int]]:
        """The attempts that wait here."""
        return self._storing.keys()

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Let a sequence wait that has drawn its first token and given its blocks back."""
        assert sequence.admitted_s is not None, "it has drawn a token"
        patience_s = min(now_s - sequence.admitted_s, STORING_MOST_S)
        self._storing[sequence.name] = sequence, min(now_s + patience_s, sequence.deadline_s)

    def pop(self, name: tuple[str, int]) -> Sequence | None:
        """Remove an attempt that was cancelled; return None if it is not here."""
        sequence, _ = self._storing.pop(name, (None, 0.0))
        return sequence

    def take_ended(self, now_s: float) -> list[Sequence]:
        """Remove and return the sequences that are handed over now."""
        if not self._storing:
            return []
        ended = [
            sequence
            for sequence, until_s in self._storing.values()
            if until_s <= now_s or self._kv_cache.are_handed_over(sequence.keys)
        ]
        for sequence in ended:
            del self._storing[sequence.name]
        return ended

    @property
    def any_ends(self) -> bool:
        """Whether one of them can be handed over now, however long it has waited."""
        return any(self._kv_cache.are_handed_over(sequence.keys) for sequence, _ in self._storing.values())

    @property
    def until_s(self) -> float:
        """When the next one has waited long enough; infinite if there is none."""
        return min((until_s for _, until_s in self._storing.values()), default=inf)

    def validate(self) -> None:
        """Raise AssertionError if one of them holds blocks."""
        assert not any(sequence.blocks for sequence, _ in self._storing.values())
