"""The road between two kvbms' pools: blocks of a peer are counted, borrowed, and read by a back end (`contract.py`).

register ──▶ describe ──▶ leading, read … ──▶ gone
read     ──▶ Borrow ──▶ place: which slots ──▶ the back end reads, Received ──▶ Return
a deadline, a fault, `gone`, a cancellation ──▶ all that the read uses is cut ──▶ read returns when that has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.kvbm.peers.connections import PeerConnections
from services.kvbm.peers.contract import BorrowedBlocks, PeerBlockReader, PlaceBlocks, ReadBlocks
from services.kvbm.peers.messages import PeerAddress, PeerFault, PeerHello
from shared.hashing import ContentKey
from shared.messages.kvbm import StoreLayout
from shared.pool.map import ArenaMap


class PeerRoad:
    """The road of one kvbm, as it reads."""

    def __init__(self, connections: PeerConnections, reader: PeerBlockReader) -> None:
        self._connections = connections
        self._reader = reader
        self._slots: dict[str, ArenaMap] = {}
        self._loop = asyncio.get_running_loop()

    def register(self, layout: StoreLayout, slots: ArenaMap) -> None:
        """Let blocks of the layout be read into these slots."""
        self._slots[layout.digest] = slots

    def unregister(self, digest: str) -> None:
        """Forget a layout that no read is for: its slots are unmapped next."""
        self._slots.pop(digest, None)

    def describe(self) -> PeerHello:
        """Return what a peer must know of this kvbm before it reads."""
        return self._connections.hello()

    async def leading(self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks the peer has in memory. Raise PeerFault."""
        return await self._connections.leading(peer, layout, keys, limit_s)

    async def read(
        self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], place: PlaceBlocks, limit_s: float
    ) -> ReadBlocks:
        """Read the leading blocks of these keys that the peer has into the slots that `place` returns. Raise PeerFault
        if nothing was read."""
        began_s = self._loop.time()
        async with self._connections.limited(limit_s) as parts:
            stream = await self._connections.connected(peer, layout, parts)
            await self._reader.prepare(peer, parts)
            lent, epoch = await self._connections.borrow(peer, stream, layout, keys)
            if not lent.blocks:
                self._connections.keep(peer, stream, parts)
                return ReadBlocks({}, 0, self._loop.time() - began_s, None)
            slots = place(lent.blocks)
            assert len(slots) == len(lent.blocks), "a place, or none, for each block"
            places = {index: slot for index, slot in enumerate(slots) if slot is not None}
            arena = self._slots[layout.digest]
            borrowed = BorrowedBlocks(peer, layout, arena, stream, parts, epoch, lent.loan, places)
            began_s = self._loop.time()
            if places:
                await self._reader.read(borrowed)
            else:
                parts.whole.add(stream)
            took_s = self._loop.time() - began_s
            if stream in parts.whole:
                await self._connections.give_back(peer, stream, lent.loan, parts)
            fault = borrowed.fault
            if parts.late and fault is not None:
                fault = PeerFault("late", f"not all blocks came in time: {fault}")
            return ReadBlocks(borrowed.written, len(lent.blocks), took_s, fault)

    def gone(self, instance: str) -> None:
        """End all that is under way with a peer that has left; its connections are closed."""
        self._connections.gone(instance)

    def close(self) -> None:
        """Close the connections and end their threads, after all reads."""
        self._connections.close()
