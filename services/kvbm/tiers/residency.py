"""Residency: which blocks are in one tier and where, and which one is evicted when room is needed. Pure.

    key ──▶ place (a slot or a record) and content          add ─▶ ContentStored      remove ─▶ ContentEvicted
     └────▶ the eviction policy, which names a victim among the blocks that may leave

A key is resident exactly from its `ContentStored` to its `ContentEvicted`, so the residency, its digest and what
routers have heard are the same. The caller chooses the order in which the policy hears of blocks: a prefix last block
first. The policy hears of uses later, before any other call, so that no reply to a fetch waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvbm.tiers.policies import EvictionPolicy
from shared.blocks import Content, ContentEvicted, ContentStored
from shared.hashing import ContentKey, event_hash

_UNFLUSHED_MOST = 4096


class Residency:
    """The blocks in one tier. `may_leave` returns whether the block in a place may go now."""

    def __init__(self, policy: EvictionPolicy, may_leave: Callable[[int], bool]) -> None:
        self.places: dict[ContentKey, int] = {}
        """The place of each block; for reading only."""
        self._policy = policy
        self._may_leave = may_leave
        self._contents: dict[ContentKey, Content] = {}
        self._unflushed_uses: list[ContentKey] = []
        """Uses that the policy has not heard of, oldest first; all of these blocks are resident."""
        self.digest = 0
        """XOR of the event hashes of all resident blocks."""

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self.places

    def content(self, key: ContentKey) -> Content:
        """Return the content of a resident block."""
        return self._contents[key]

    def add(self, content: Content, place: int) -> ContentStored:
        """Add a block that is not resident: it can be found from now on."""
        key = content.key
        assert key not in self.places, f"{key.hex()} is added twice"
        self.places[key] = place
        self._contents[key] = content
        self.digest ^= event_hash(key)
        self.flush_uses()
        self._policy.stored(key)
        return ContentStored(content)

    def record_use(self, keys: Iterable[ContentKey]) -> None:
        """Record that these resident blocks were used; a prefix last block first."""
        self._unflushed_uses.extend(keys)
        if len(self._unflushed_uses) > _UNFLUSHED_MOST:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Report the recorded uses to the policy."""
        if self._unflushed_uses:
            used = self._policy.used
            for key in self._unflushed_uses:
                used(key)
            self._unflushed_uses.clear()

    def set_backed(self, key: ContentKey, below: bool) -> None:
        """Report to the policy whether the tier below has the block, which is resident."""
        self.flush_uses()
        self._policy.backed(key, below)

    def remove(self, key: ContentKey) -> ContentEvicted:
        """Remove a resident block: it cannot be found any more."""
        self.flush_uses()
        content = self._contents.pop(key)
        del self.places[key]
        self.digest ^= event_hash(key)
        self._policy.gone(key)
        return ContentEvicted(content)

    def evict(self) -> tuple[int, ContentEvicted] | None:
        """Remove the block that the policy names, and return its place with it. None if no block may go."""
        self.flush_uses()
        key = self._policy.victim(self._may_go)
        if key is None:
            return None
        assert self._may_go(key), "the policy named a block that may not go"
        return self.places[key], self.remove(key)

    def snapshot(self) -> list[Content]:
        """Return all resident blocks, each after its parent if that is resident. Blocks of which an engine says that
        they follow one another in a circle come once each."""
        ordered: dict[ContentKey, Content] = {}
        for content in self._contents.values():
            branch: dict[ContentKey, Content] = {}
            above: Content | None = content
            while above is not None and above.key not in ordered and above.key not in branch:
                branch[above.key] = above
                above = self._contents.get(above.parent) if above.parent is not None else None
            ordered.update(reversed(branch.items()))
        return list(ordered.values())

    def _may_go(self, key: ContentKey) -> bool:
        place = self.places.get(key)
        return place is not None and self._may_leave(place)

    def validate(self) -> None:
        """Raise AssertionError if the residency contradicts itself. O(blocks)."""
        assert self.places.keys() == self._contents.keys(), "a block without a place or a place without a block"
        assert len(set(self.places.values())) == len(self.places), "two blocks in one place"
        assert self.places.keys() >= set(self._unflushed_uses), "a use of a block that has left is recorded"
        assert len(self._unflushed_uses) <= _UNFLUSHED_MOST, "too many uses are recorded"
        digest = 0
        for key, content in self._contents.items():
            assert content.key == key, f"{key.hex()} is kept under another key"
            digest ^= event_hash(key)
        assert digest == self.digest, "digest differs from the content"
