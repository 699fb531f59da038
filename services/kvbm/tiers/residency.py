"""Shelf: what can be found in one tier, and who goes first when room is needed. Pure.

    key ──▶ place (a slot or a record) and content          put ─▶ Stored      take ─▶ Evicted
     └────▶ the eviction policy, which names a victim among those that may leave

A key is on the shelf exactly from its `Stored` to its `Evicted`, so the shelf, its digest and what routers have heard
are the same. Who is told to the policy in which order is the caller's: a prefix last block first. Uses are told later,
before anything else is asked or told, so that no answer to a fetch waits for the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvbm.tiers.policies import EvictionPolicy
from shared.blocks import Content, Evicted, Stored
from shared.hashing import ContentKey, event_hash

_UNFLUSHED_MOST = 4096


class Residency:
    """One tier's. `may_leave` says of a place whether its block may go now."""

    def __init__(self, policy: EvictionPolicy, may_leave: Callable[[int], bool], *, leaves_first: bool = False) -> None:
        self.places: dict[ContentKey, int] = {}
        """Where each block is; for reading only."""
        self._policy = policy
        self._may_leave = may_leave
        self._leaves_first = leaves_first
        self._contents: dict[ContentKey, Content] = {}
        self._children: dict[ContentKey, int] = {}
        """Parent → how many blocks of the shelf follow it; the parent itself need not be there."""
        self._unflushed_uses: list[ContentKey] = []
        """Uses that the policy has not heard of, oldest first; all of them are there."""
        self.digest = 0
        """XOR of the event hashes of everything that can be found."""

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self.places

    def content(self, key: ContentKey) -> Content:
        """Of a block that is there."""
        return self._contents[key]

    def add(self, content: Content, place: int) -> Stored:
        """The block can be found from now on; it is not there yet."""
        key = content.key
        assert key not in self.places, f"{key.hex()} is put twice"
        self.places[key] = place
        self._contents[key] = content
        if content.parent is not None:
            self._children[content.parent] = self._children.get(content.parent, 0) + 1
        self.digest ^= event_hash(key)
        self.flush_uses()
        self._policy.stored(key)
        return Stored(content)

    def record_use(self, keys: Iterable[ContentKey]) -> None:
        """These, all there, were used; a prefix last block first."""
        self._unflushed_uses.extend(keys)
        if len(self._unflushed_uses) > _UNFLUSHED_MOST:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Tells the policy what it has not heard of yet."""
        if self._unflushed_uses:
            used = self._policy.used
            for key in self._unflushed_uses:
                used(key)
            self._unflushed_uses.clear()

    def set_backed(self, key: ContentKey, below: bool) -> None:
        """Whether the tier below has the block, which is there, may have changed."""
        self.flush_uses()
        self._policy.backed(key, below)

    def remove(self, key: ContentKey) -> Evicted:
        """The block, which is there, cannot be found any more."""
        self.flush_uses()
        content = self._contents.pop(key)
        del self.places[key]
        if content.parent is not None:
            left = self._children[content.parent] - 1
            if left:
                self._children[content.parent] = left
            else:
                del self._children[content.parent]
        self.digest ^= event_hash(key)
        self._policy.gone(key)
        return Evicted(content)

    def victim(self) -> ContentKey | None:
        """The block that the policy would have go, which stays until `take`; None: none may."""
        self.flush_uses()
        key = self._policy.victim(self._may_go)
        assert key is None or self._may_go(key), "the policy named a block that may not go"
        return key

    def snapshot(self) -> list[Content]:
        """Everything that can be found, each block after its parent where the parent is there; of blocks that an engine
        says follow one another in a circle, each once."""
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
        return place is not None and self._may_leave(place) and not (self._leaves_first and key in self._children)

    def validate(self) -> None:
        """Raises AssertionError where the shelf contradicts itself. O(blocks)."""
        assert self.places.keys() == self._contents.keys(), "a block without a place or a place without a block"
        assert len(set(self.places.values())) == len(self.places), "two blocks in one place"
        assert self.places.keys() >= set(self._unflushed_uses), "a block that has gone is to be told as used"
        assert len(self._unflushed_uses) <= _UNFLUSHED_MOST, "too much is untold"
        digest = 0
        children: dict[ContentKey, int] = {}
        for key, content in self._contents.items():
            assert content.key == key, f"{key.hex()} is kept under another key"
            digest ^= event_hash(key)
            if content.parent is not None:
                children[content.parent] = children.get(content.parent, 0) + 1
        assert digest == self.digest, "digest differs from the content"
        assert children == self._children, "children are counted wrong"
