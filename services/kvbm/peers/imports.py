"""Reads blocks of other machines' kvbms into this kvbm's layouts.

    read ──▶ slots are reserved: a store ticket of an owner of this kvbm's own ──▶ the road copies ──▶ what came whole
             is published, the other slots are free

The store ticket has a deadline as an engine's has. A read that ends later publishes nothing, and its slots stay in
quarantine until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.kvbm.config import PeersConfig
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.messages import PeerAddress, PeerFault
from services.kvbm.peers.road import PeerRoad, ReadBlocks
from services.kvbm.tickets.errors import Refusal
from shared.hashing import ContentKey
from shared.messages.kvbm import StoreBlock
from shared.rate_limited_log import RateLimitedLog

OWNER = "peer:reads"
"""The owner of the store tickets. No engine can have the name, since a file of engines has no colon in it."""


class PeerImports:
    """The reads of one kvbm that are under way."""

    def __init__(self, road: PeerRoad, config: PeersConfig, metrics: StoreMetrics) -> None:
        self.road = road
        self.faults = RateLimitedLog()
        self._config = config
        self._metrics = metrics
        self._reads: Counter[str] = Counter()
        """Reads under way by layout."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Cancel the reads, and wait until nothing writes to their slots."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def under_way(self) -> int:
        """The number of reads."""
        return self._reads.total()

    @property
    def full(self) -> bool:
        """Whether no further read may begin."""
        return self.under_way >= self._config.reads

    async def read(
        self, peer: PeerAddress, layout: LayoutStore, keys: Sequence[ContentKey], limit_s: float
    ) -> ReadBlocks:
        """Read leading blocks of these keys from the peer and publish them. It goes on if the caller is cancelled,
        until `limit_s` or `close`."""
        task = asyncio.create_task(self._read(peer, layout, keys, limit_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _read(
        self, peer: PeerAddress, layout: LayoutStore, keys: Sequence[ContentKey], limit_s: float
    ) -> ReadBlocks:
        assert not self.full, "too many reads"
        if layout.ended:  # its arena went to another layout while peers were asked
            return ReadBlocks({}, 0, 0.0, None)
        if not self._reads[layout.digest]:
            layout.attach(OWNER)
        self._reads[layout.digest] += 1
        reserved = _Reserved(layout)
        began_s = asyncio.get_running_loop().time()
        limit_s = min(limit_s, self._config.read_s, layout.tickets.limits.store_time_s)
        try:
            done = await self.road.read(peer, layout.layout, keys, reserved.place, limit_s)
            reserved.publish(done.written)
        except PeerFault as wrong:
            done = ReadBlocks({}, 0, 0.0, wrong)
        except Refusal as wrong:  # of blocks that no engine could have stored, or it took too long
            fault = PeerFault("late" if wrong.code == "expired" else "refused", str(wrong))
            done = ReadBlocks({}, 0, 0.0, fault)
        finally:
            reserved.end()
            self._reads[layout.digest] -= 1
            if not self._reads[layout.digest]:
                del self._reads[layout.digest]
                layout.owner_dead(OWNER)
            self._metrics.peer_read_seconds.observe(asyncio.get_running_loop().time() - began_s)
        self._count(peer, layout, done, reserved)
        return done

    def _count(self, peer: PeerAddress, layout: LayoutStore, done: ReadBlocks, reserved: _Reserved) -> None:
        if done.fault is not None:
            self.count_fault(peer, done.fault)
        outcome = "whole" if done.written and done.fault is None else "part" if done.written else "nothing"
        if done.lent and not reserved.slots and done.fault is None:
            outcome = "full"
        self._metrics.peer_reads.labels(outcome).inc()
        self._metrics.peer_read_blocks.inc(len(done.written))
        self._metrics.peer_read_bytes.inc(len(done.written) * layout.layout.kv.block_bytes)

    def validate(self) -> None:
        """Raise AssertionError if the reads contradict themselves."""
        assert all(count > 0 for count in self._reads.values()), "a layout without a read"
        assert self.under_way <= self._config.reads, "too many reads"
        assert self.under_way <= len(self._tasks), "a read without a task"

    def count_fault(self, peer: PeerAddress, fault: PeerFault) -> None:
        """Count a fault of a peer, and log it at most once in a while."""
        self._metrics.peer_faults.labels("read", fault.code).inc()
        self.faults.warn(f"peer {peer.instance}", f"its blocks are not read: {fault.code}: {fault}")


class _Reserved:
    """The slots of one read."""

    def __init__(self, layout: LayoutStore) -> None:
        self.slots: list[int] = []
        self._layout = layout
        self._ticket = 0

    def place(self, blocks: Sequence[StoreBlock]) -> list[int | None]:
        """Reserve slots for the blocks that are not here. Raise Refusal."""
        granted = self._layout.reserve(OWNER, blocks)
        self._ticket, self.slots = granted.ticket, granted.slots
        places: list[int | None] = [None] * len(blocks)
        for index, slot in zip(granted.indices, granted.slots, strict=True):
            places[index] = slot
        return places

    def publish(self, written: dict[int, int]) -> None:
        """Publish what came whole, in the order of the prefix. Raise Refusal."""
        if self._ticket:
            ticket, self._ticket = self._ticket, 0
            self._layout.publish(OWNER, ticket, {slot: written[slot] for slot in self.slots if slot in written})

    def end(self) -> None:
        """Free the slots, if they were not published: nothing writes to them."""
        if self._ticket:
            self._layout.tickets.abort(OWNER, self._ticket)
            self._layout.settle_soon()
            self._ticket = 0
