"""Offloading: which blocks of the device the kvbm is offered, and which ones are pinned while they are copied. Pure.

    filled     a block is stored ──▶ queue (where it is full, the oldest block is dropped) ──▶ offered, if still cached
    evicted    a block is cached, and among the next to be evicted ──▶ offered, once
    off        nothing is offered

Blocks that came from the kvbm are not offered to it. Blocks that were read from another engine are stored by that
engine, and queued here only when it has gone: it may not have stored them. An offer holds nothing. When the kvbm grants
slots for offered blocks, those that are still cached are pinned, copied and unpinned; the others are not copied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import ceil

from services.worker.config import Offload
from services.worker.scheduler.block_notes import BlockNotes
from services.worker.scheduler.owed_blocks import OwedBlocks
from shared.blocks import BlockPool, Content
from shared.hashing import ContentKey

HORIZON_SHARE = 1 / 8
HORIZON_BLOCKS = 256
"""A block is offered when it would be evicted within this number of allocations, or within `HORIZON_SHARE` of the
device if that is less. 256 blocks are half a second's worth of prefilling 8,192 tokens a second."""


class Offloading:
    """Offers of one engine's blocks to its kvbm."""

    def __init__(self, pool: BlockPool, offload: Offload, limit_blocks: int, notes: BlockNotes) -> None:
        """`limit_blocks` bounds the queue of blocks that wait to be offered."""
        self._pool = pool
        self._notes = notes
        self._offload = offload
        self._horizon_blocks = min(HORIZON_BLOCKS, ceil(HORIZON_SHARE * pool.capacity))
        self._enabled = False
        self._limit_blocks = limit_blocks
        self._queue: deque[Content] = deque(maxlen=limit_blocks)
        self._remote: list[ContentKey | None] = [None] * pool.capacity
        """Slot → the key under which its content was offered to the kvbm, or came from it."""
        self._shared: dict[str, dict[int, ContentKey]] = {}
        """Sharer's worker, which has not gone since → slot → the block that was read from it into the slot, which
        may have been evicted since; parents first. Only with `filled`."""
        self._exhausted = (-1, -1)
        """The pool's (evictions, free blocks) when nothing was left to offer."""
        self._owed = OwedBlocks()
        """Only with `filled`."""
        self._pinned: dict[int, ContentKey] = {}
        """Slot → the block that copies read there."""
        self._pins: Counter[int] = Counter()
        """Slot → number of copies that read it."""
        self.queues = False
        """Whether the caller must `enqueue` each block that was computed."""
        self.offered_blocks = 0
        """Blocks offered since the start."""
        self.dropped_blocks = 0
        """Blocks dropped from a full queue since the start."""

    def set_enabled(self, enabled: bool) -> None:
        """A kvbm is there, or no longer. A new kvbm is offered the blocks that were stored last, since it may know
        nothing of those offered to the kvbm before it."""
        self._enabled = enabled
        self.queues = enabled and self._offload == "filled"
        self._queue.clear()
        self._owed.clear()
        self._remote = [None] * self._pool.capacity
        self._shared.clear()
        self._exhausted = (-1, -1)
        if self.queues:
            for content in self._pool.newest(self._limit_blocks):
                self.enqueue(content)

    def enqueue(self, content: Content) -> None:
        """A block was computed; it waits to be offered."""
        if len(self._queue) == self._queue.maxlen:
            self.dropped_blocks += 1
            self._owed.settle(self._queue[0].key)
            self._notes.add(self._queue[0].key, "not offered to the kvbm: too many blocks waited to be offered")
        self._queue.append(content)
        self._owed[content.key] += 1

    def owes(self, keys: Sequence[ContentKey]) -> bool:
        """Return whether any of these blocks is still on its way to the kvbm. Only with `filled`."""
        return bool(self._owed) and any(key in self._owed for key in keys)

    def declined(self, keys: Sequence[ContentKey]) -> None:
        """The kvbm has these offered blocks already, or does not take them."""
        for key in keys:
            self._owed.settle(key)

    def asked_again(self, keys: Sequence[ContentKey]) -> None:
        """The kvbm is asked once more for these blocks, whose copies have ended."""
        if self.queues:
            self._owed.update(keys)

    def mark_remote(self, keys: Sequence[ContentKey]) -> None:
        """Blocks were loaded from the kvbm, so that they need not be offered."""
        for key in keys:
            slot = self._pool.find(key)
            assert slot is not None
            self._remote[slot] = key

    def mark_shared(self, keys: Sequence[ContentKey], sharer: str) -> None:
        """Blocks were copied from the engine of the worker `sharer`, which offers them to the kvbm itself."""
        if self.queues:
            shared = self._shared.setdefault(sharer, {})
            for key in keys:
                slot = self._pool.find(key)
                assert slot is not None
                shared.pop(slot, None)  # so that it comes after its parent
                shared[slot] = key

    def enqueue_shared(self, sharer: str) -> None:
        """The worker `sharer` has gone, or its engine: what it shared waits to be offered. O(blocks that it shared)."""
        for slot, key in self._shared.pop(sharer, {}).items():
            content = self._pool.content(slot)
            if self._pool.find(key) == slot and content is not None:
                self.enqueue(content)

    def offers(self, most: int) -> list[Content]:
        """Return at most `most` blocks to offer, parents first."""
        if not self._enabled or self._offload == "off":
            return []
        offers = self._queued(most) if self._offload == "filled" else self._next_evicted(most)
        self.offered_blocks += len(offers)
        for content in offers:
            self._notes.add(content.key, "offered to the kvbm")
        return offers

    def pin(self, keys: Sequence[ContentKey], reserve: int) -> list[int | None]:
        """Return the slots of these blocks, held for copies. None if the block was evicted, or with it fewer than
        `reserve` blocks would be left to allocate."""
        slots: list[int | None] = []
        for key in keys:
            slot = self._pool.find(key)
            if slot is not None and self._pool.state(slot) == "cached" and self._pool.available <= reserve:
                slot = None
            if slot is None:
                self._owed.settle(key)
                self._notes.add(key, "not copied to the kvbm: it was evicted meanwhile, or no room is to spare")
            else:
                self._pool.hold_for_copy(slot)
                self._pins[slot] += 1
                self._pinned[slot] = key
            slots.append(slot)
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """The copies that read these slots have ended."""
        for slot in slots:
            assert self._pins[slot] > 0, f"no copy holds slot {slot}"
            self._pins[slot] -= 1
            self._owed.settle(self._pinned[slot])
            if not self._pins[slot]:
                del self._pins[slot], self._pinned[slot]
        self._pool.release_copies(slots)

    def _queued(self, most: int) -> list[Content]:
        offers: list[Content] = []
        while self._queue and len(offers) < most:
            content = self._queue.popleft()
            if content.key in self._pool:
                offers.append(content)
            else:
                self._owed.settle(content.key)
        return offers

    def _next_evicted(self, most: int) -> list[Content]:
        churn = self._pool.evictions, self._pool.free
        if churn == self._exhausted:
            return []
        offers: list[Content] = []
        for slot in self._pool.next_evicted(self._horizon_blocks):
            content = self._pool.content(slot)
            assert content is not None
            if self._remote[slot] != content.key:
                if len(offers) == most:
                    break
                self._remote[slot] = content.key
                offers.append(content)
        else:
            self._exhausted = churn
        offers.reverse()  # children are evicted before their parents
        return offers

    def pinned(self) -> list[int]:
        """Return the slots that copies read."""
        return list(self._pins)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert self.queues == (self._enabled and self._offload == "filled")
        assert self.queues or not self._queue
        assert self.queues or not self._shared
        assert all(0 <= slot < self._pool.capacity for shared in self._shared.values() for slot in shared)
        assert all(times > 0 for times in self._owed.values())
        assert self._pinned.keys() == self._pins.keys()
        for slot, copies in self._pins.items():
            assert copies > 0
            assert self._pool.state(slot) == "held"
