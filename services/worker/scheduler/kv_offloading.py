"""Offloading: which blocks of the device the kvbm is offered, and which are held while they are copied. Pure.

    filled     stored ──▶ queue (the oldest goes, where it is full) ──▶ offered, if still there
    evicted    cached, and among the next to leave ──▶ offered, once
    off        nothing

Blocks that came from the kvbm are not offered to it. An offer holds nothing: what was granted is held by `hold`,
copied, and let go; what was evicted in between is not copied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import ceil

from services.worker.limits import Offload
from shared.blocks import BlockPool, Content
from shared.hashing import ContentKey

HORIZON_SHARE = 1 / 8
HORIZON_BLOCKS = 256
"""Blocks are offered when they would leave with so many allocations more, or this share of the device: half a second's
worth of prefilling 8,192 tokens a second."""


class Offloading:
    """See the module."""

    def __init__(self, pool: BlockPool, offload: Offload, limit_blocks: int) -> None:
        self._pool = pool
        self._offload = offload
        self._horizon_blocks = min(HORIZON_BLOCKS, ceil(HORIZON_SHARE * pool.capacity))
        self._on = False
        self._limit_blocks = limit_blocks
        self._queue: deque[Content] = deque(maxlen=limit_blocks)
        self._offered: list[ContentKey | None] = [None] * pool.capacity
        """Slot → the key under which what it holds was offered, or came."""
        self._looked = (-1, -1)
        """The pool's churn when nothing was left to offer."""
        self._held: Counter[int] = Counter()
        """Slot → copies that read it."""
        self.queues = False
        """Whether `stored` is to be told."""
        self.offered_blocks = 0
        self.dropped_blocks = 0
        """Left out because too many waited."""

    def turn(self, on: bool) -> None:
        """Whether a kvbm is there. A new one is offered what was stored last: it may have forgotten everything."""
        self._on = on
        self.queues = on and self._offload == "filled"
        self._queue.clear()
        self._offered = [None] * self._pool.capacity
        self._looked = (-1, -1)
        if self.queues:
            self._queue.extend(self._pool.newest(self._limit_blocks))

    def stored(self, content: Content) -> None:
        """A block was computed."""
        self.dropped_blocks += len(self._queue) == self._queue.maxlen
        self._queue.append(content)

    def came(self, content: Content) -> None:
        """A block was loaded from the kvbm."""
        slot = self._pool.find(content.key)
        assert slot is not None
        self._offered[slot] = content.key

    def offers(self, most: int) -> list[Content]:
        """At most so many blocks, parents first."""
        if not self._on or self._offload == "off":
            return []
        offers = self._of_queue(most) if self._offload == "filled" else self._of_leaving(most)
        self.offered_blocks += len(offers)
        return offers

    def hold(self, keys: Sequence[ContentKey], reserve: int) -> list[int | None]:
        """Their slots, held for copies; None: evicted, or there would be fewer than `reserve` blocks to allocate."""
        slots: list[int | None] = []
        for key in keys:
            slot = self._pool.find(key)
            if slot is not None and self._pool.state(slot) == "cached" and self._pool.available <= reserve:
                slot = None
            if slot is not None:
                self._pool.hold_for_copy(slot)
                self._held[slot] += 1
            slots.append(slot)
        return slots

    def let_go(self, slots: Sequence[int]) -> None:
        """Their copies have ended."""
        for slot in slots:
            assert self._held[slot] > 0, f"no copy holds slot {slot}"
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
        self._pool.release_copies(slots)

    def _of_queue(self, most: int) -> list[Content]:
        offers: list[Content] = []
        while self._queue and len(offers) < most:
            content = self._queue.popleft()
            if content.key in self._pool:
                offers.append(content)
        return offers

    def _of_leaving(self, most: int) -> list[Content]:
        churn = self._pool.evictions, self._pool.free
        if churn == self._looked:
            return []
        offers: list[Content] = []
        for slot in self._pool.next_evicted(self._horizon_blocks):
            content = self._pool.content(slot)
            assert content is not None
            if self._offered[slot] != content.key:
                if len(offers) == most:
                    break
                self._offered[slot] = content.key
                offers.append(content)
        else:
            self._looked = churn
        offers.reverse()  # children leave before their parents
        return offers

    def holds(self) -> list[int]:
        """Slots that copies read; for `validate`."""
        return list(self._held)

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself."""
        assert self.queues == (self._on and self._offload == "filled")
        assert self.queues or not self._queue
        for slot, copies in self._held.items():
            assert copies > 0
            assert self._pool.state(slot) == "held"
