"""The road between two kvbms' pools: blocks of a peer are counted, borrowed, and read by a back end: `sockets.py` or
`nixl_reader.py`.

register ──▶ leading, read … ──▶ gone
read     ──▶ Borrow ──▶ place: which slots ──▶ the back end reads, Received ──▶ Return
a deadline, a fault, `gone`, a cancellation ──▶ all that the read uses is cut ──▶ read returns when that has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct, field

from services.kvbm.peers.connections import PeerConnections, ReadParts
from services.kvbm.peers.messages import PeerAddress, PeerFault
from services.kvbm.peers.stream import PeerStream
from shared.hashing import ContentKey
from shared.messages.kvbm import StoreBlock, StoreLayout
from shared.pool.map import ArenaMap

PlaceBlocks = Callable[[Sequence[StoreBlock]], Sequence[int | None]]
"""Returns the slot for each of the blocks that a peer lends; None for one that is not wanted. Called once, or never."""


class ReadBlocks(Struct, frozen=True):
    """What came of a read."""

    written: dict[int, int]
    """The slots whose blocks came whole, with their XXH3-64."""
    lent: int
    """The number of blocks that the peer had."""
    took_s: float
    """Seconds in which the bytes came."""
    fault: PeerFault | None
    """Why not all of them came, if not."""


class BorrowedBlocks(Struct, eq=False):
    """One read, after its blocks were lent: where they go, and what has come."""

    peer: PeerAddress
    layout: StoreLayout
    slots: ArenaMap
    stream: PeerStream
    """The connection on which they were borrowed."""
    parts: ReadParts
    epoch: int
    loan: int
    places: dict[int, int]
    """The slot of each block that is wanted, by its index in the loan; at least one."""
    written: dict[int, int] = field(default_factory=dict)
    """The slots whose blocks have come whole, with their XXH3-64."""
    fault: PeerFault | None = None
    """Why not all of them come, if not."""


class PeerBlockReader(Protocol):
    """One back end, as one kvbm reads with it: it moves the bytes of blocks that are lent.

    A back end that writes to a peer's pool, or has it read by hardware, keeps to the same promises:
    - nothing is believed of a peer before `check_hello` and `check_layout` have passed for what it says of itself;
    - a lender's slot is held until nothing on its way to a reader can read it any more;
    - when `read` returns or raises, and also when it was cancelled, nothing writes to the reader's slots any more.
    """

    async def prepare(self, peer: PeerAddress, parts: ReadParts) -> None:
        """Get what a read needs, before anything is borrowed for it. Raise PeerFault."""
        ...

    async def read(self, borrowed: BorrowedBlocks) -> None:
        """Read the blocks into their slots; note what came whole, or the fault. If the connection is in order
        afterwards, it is in `parts.whole`."""
        ...


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
