"""The road over TCP: reads blocks of a peer through several connections at once, straight into this pool's slots.

    read ──▶ Borrow on one connection ──▶ place: which slots ──▶ Takes, which the connections share out ──▶ Return
                                                                  │ a thread each: header, bytes, checksum
    a deadline, a fault, `gone`, a cancellation ──▶ the connections are cut ──▶ their threads end ──▶ read returns

A connection that has ended a read in order is kept for the next one (`connections.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from services.kvbm.config import PeersConfig
from services.kvbm.peers.connections import PeerConnections, ReadParts, receive_answer
from services.kvbm.peers.contract import PlaceBlocks, ReadBlocks
from services.kvbm.peers.messages import (
    PEER_QUESTION,
    Lent,
    PeerAddress,
    PeerFault,
    PeerHello,
    PeerRefused,
    Received,
    Take,
    plan_takes,
)
from services.kvbm.peers.stream import PeerStream
from services.kvbm.peers.tls import PeerTls
from shared.hashing import ContentKey
from shared.kvbm_messages import StoreLayout
from shared.pool.map import ArenaMap


class _Reading(Struct, eq=False):
    """What the threads of one read share."""

    slots: ArenaMap
    block_bytes: int
    epoch: int
    loan: int
    places: Sequence[int | None]
    takes: deque[list[int]]
    written: dict[int, int] = field(default_factory=dict)
    fault: PeerFault | None = None


class SocketRoad:
    """The road of one kvbm, as it reads. `hello` says what it is to others."""

    def __init__(self, config: PeersConfig, tls: PeerTls | None, hello: Callable[[], PeerHello]) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._slots: dict[str, ArenaMap] = {}
        self._connections = PeerConnections(config, tls, hello)

    # --- the contract

    def register(self, layout: StoreLayout, slots: ArenaMap) -> None:
        """Let blocks of the layout be read into these slots."""
        self._slots[layout.digest] = slots

    def unregister(self, digest: str) -> None:
        """Forget a layout that no read is for."""
        self._slots.pop(digest, None)

    def describe(self) -> PeerHello:
        """Return what each connection of this kvbm's port begins with."""
        return self._connections.hello()

    async def leading(self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks the peer has in memory. Raise PeerFault."""
        return await self._connections.leading(peer, layout, keys, limit_s)

    async def read(
        self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], place: PlaceBlocks, limit_s: float
    ) -> ReadBlocks:
        """Read the leading blocks of these keys that the peer has into the slots that `place` returns. Raise PeerFault
        where nothing was read."""
        began_s = self._loop.time()
        with self._connections.limited(limit_s) as parts:
            first = await self._connections.connected(peer, layout, parts)
            lent, epoch = await self._connections.borrow(peer, first, layout, keys)
            if not lent.blocks:
                self._connections.keep(peer, first, parts)
                return ReadBlocks({}, 0, self._loop.time() - began_s, None)
            places = place(lent.blocks)
            assert len(places) == len(lent.blocks), "a place, or none, for each block"
            wanted = [index for index, slot in enumerate(places) if slot is not None]
            block_bytes = layout.kv.block_bytes
            takes = plan_takes(wanted, block_bytes, self._config.streams, self._config.take_bytes)
            reading = _Reading(self._slots[layout.digest], block_bytes, epoch, lent.loan, places, deque(takes))
            began_s = self._loop.time()
            await self._read_all(peer, layout, first, parts, reading, lent)
            return ReadBlocks(reading.written, len(lent.blocks), self._loop.time() - began_s, reading.fault)

    def gone(self, instance: str) -> None:
        """Close the connections to a peer that has left; its reads end."""
        self._connections.gone(instance)

    async def close(self) -> None:
        """End the connections and threads, after all reads."""
        self._connections.close()

    # --- one read

    async def _read_all(
        self,
        peer: PeerAddress,
        layout: StoreLayout,
        first: PeerStream,
        parts: ReadParts,
        reading: _Reading,
        lent: Lent,
    ) -> None:
        """Take all blocks over several connections, and return the loan. Nothing writes to a slot afterwards."""
        more = min(self._config.streams, len(reading.takes)) - 1
        pulls = [asyncio.ensure_future(self._pull(peer, layout, first, parts, reading))]
        pulls += [asyncio.ensure_future(self._pull(peer, layout, None, parts, reading)) for _ in range(more)]
        try:
            await asyncio.wait(pulls)
        finally:
            await parts.ended(pulls)
        if reading.fault is None or first in parts.whole:
            await self._connections.give_back(peer, first, lent.loan, parts)
        if parts.late and reading.fault is not None:
            reading.fault = PeerFault("late", f"not all blocks came in time: {reading.fault}")

    async def _pull(
        self,
        peer: PeerAddress,
        layout: StoreLayout,
        first: PeerStream | None,
        parts: ReadParts,
        reading: _Reading,
    ) -> None:
        """Take blocks over one connection as long as there are any."""
        try:
            stream = first or await self._connections.connected(peer, layout, parts)
            await self._connections.in_thread(_take_all, stream, reading)
        except PeerFault as wrong:
            reading.fault = reading.fault or wrong
            return
        parts.whole.add(stream)
        if first is None:
            self._connections.keep(peer, stream, parts)


# --- in threads


def _take_all(stream: PeerStream, reading: _Reading) -> None:
    """Take what is left, and report at the end that all has come. Raise PeerFault; what came before it is right."""
    while reading.fault is None or reading.fault.code == "checksum":
        try:
            indices = reading.takes.popleft()
        except IndexError:
            break
        number = stream.next_number()
        stream.send_frame(PEER_QUESTION.encode(Take(number, reading.epoch, reading.loan, indices)))
        for index in indices:
            _take_one(stream, reading, number, index)
    stream.send_frame(PEER_QUESTION.encode(Received()))


def _take_one(stream: PeerStream, reading: _Reading, number: int, index: int) -> None:
    header = stream.receive_header(number, index, reading.block_bytes)
    if not header.size_bytes:
        refused = receive_answer(stream)
        reason = refused.reason[:200] if isinstance(refused, PeerRefused) else "no reason"
        raise PeerFault("refused", f"the peer sends no block of loan {reading.loan}: {reason}")
    slot = reading.places[index]
    assert slot is not None, "it is not wanted"
    with reading.slots.slot(slot) as whole, whole[: reading.block_bytes] as memory:
        checksum = stream.receive_into(memory)
    if checksum == header.checksum:
        reading.written[slot] = checksum
    else:
        reading.fault = PeerFault("checksum", f"block {index} came as {checksum:016x}, not {header.checksum:016x}")
