"""The back end over TCP: takes lent blocks through several connections at once, straight into this pool's slots.

    read ──▶ Takes, which the connections share out ──▶ a thread each: header, bytes, checksum ──▶ Received

A connection that has ended a read in order is kept for the next one (`connections.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque

from services.kvbm.config import PeersConfig
from services.kvbm.peers.connections import PeerConnections, ReadParts, receive_answer
from services.kvbm.peers.messages import (
    PEER_QUESTION,
    PeerAddress,
    PeerFault,
    PeerRefused,
    Received,
    Take,
    plan_takes,
)
from services.kvbm.peers.road import BorrowedBlocks
from services.kvbm.peers.stream import PeerStream


class SocketReader:
    """The TCP connections of one kvbm, as blocks are read over them."""

    def __init__(self, connections: PeerConnections, config: PeersConfig) -> None:
        self._connections = connections
        self._config = config

    async def prepare(self, peer: PeerAddress, parts: ReadParts) -> None:
        """Do nothing: further connections are made when there is something to take."""

    async def read(self, borrowed: BorrowedBlocks) -> None:
        """Take all blocks over several connections. Nothing writes to a slot afterwards."""
        block_bytes = borrowed.layout.kv.block_bytes
        planned = plan_takes(list(borrowed.places), block_bytes, self._config.streams, self._config.take_bytes)
        takes = deque(planned)
        more = min(self._config.streams, len(planned)) - 1
        pulls = [asyncio.ensure_future(self._pull(borrowed, takes, borrowed.stream))]
        pulls += [asyncio.ensure_future(self._pull(borrowed, takes, None)) for _ in range(more)]
        try:
            await asyncio.wait(pulls)
        finally:
            await borrowed.parts.ended(pulls)

    async def _pull(self, borrowed: BorrowedBlocks, takes: deque[list[int]], first: PeerStream | None) -> None:
        """Take blocks over one connection as long as there are any."""
        peer, parts = borrowed.peer, borrowed.parts
        try:
            self._connections.busy_with(peer)  # or a connection would be made to a peer that has left
            stream = first or await self._connections.connected(peer, borrowed.layout, parts)
            await self._connections.in_thread(_take_all, stream, borrowed, takes)
        except PeerFault as wrong:
            borrowed.fault = borrowed.fault or wrong
            return
        parts.whole.add(stream)
        if first is None:
            self._connections.keep(peer, stream, parts)


# --- in threads


def _take_all(stream: PeerStream, borrowed: BorrowedBlocks, takes: deque[list[int]]) -> None:
    """Take what is left, and report at the end that all has come. Raise PeerFault; what came before it is right."""
    while borrowed.fault is None or borrowed.fault.code == "checksum":
        try:
            indices = takes.popleft()
        except IndexError:
            break
        number = stream.next_number()
        stream.send_frame(PEER_QUESTION.encode(Take(number, borrowed.epoch, borrowed.loan, indices)))
        for index in indices:
            _take_one(stream, borrowed, number, index)
    stream.send_frame(PEER_QUESTION.encode(Received()))


def _take_one(stream: PeerStream, borrowed: BorrowedBlocks, number: int, index: int) -> None:
    block_bytes = borrowed.layout.kv.block_bytes
    header = stream.receive_header(number, index, block_bytes)
    if not header.size_bytes:
        refused = receive_answer(stream)
        reason = refused.reason[:200] if isinstance(refused, PeerRefused) else "no reason"
        raise PeerFault("refused", f"the peer sends no block of loan {borrowed.loan}: {reason}")
    slot = borrowed.places[index]
    with borrowed.slots.slot(slot) as whole, whole[:block_bytes] as memory:
        checksum = stream.receive_into(memory)
    if checksum == header.checksum:
        borrowed.written[slot] = checksum
    else:
        borrowed.fault = PeerFault("checksum", f"block {index} came as {checksum:016x}, not {header.checksum:016x}")
