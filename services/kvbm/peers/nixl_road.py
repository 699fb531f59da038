"""The road over NIXL: blocks are asked for and pinned over a connection, and a NIXL process reads them into this pool.

    read ──▶ Borrow ──▶ place: which slots ──▶ Locate: where they lie, and their checksums ──▶ Pull, in a NIXL process
         ──▶ each block's checksum is compared ──▶ Received, Return
    a deadline, a fault, `gone`, a cancellation ──▶ the process is killed ──▶ read returns when it has ended

A process serves one read at a time, and is kept for the next one if all of it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from services.kvbm.config import PeersConfig
from services.kvbm.peers.connections import PeerConnections, ReadParts
from services.kvbm.peers.contract import PlaceBlocks, ReadBlocks
from services.kvbm.peers.messages import (
    PEER_QUESTION,
    Lent,
    Locate,
    Located,
    PeerAddress,
    PeerFault,
    PeerHello,
    Received,
    check_located,
)
from services.kvbm.peers.nixl_messages import Pull, Pulled
from services.kvbm.peers.nixl_process import NixlProcess
from services.kvbm.peers.stream import PeerStream
from shared.hashing import ContentKey
from shared.kvbm_messages import StoreLayout
from shared.pool.map import ArenaMap


class NixlRoad:
    """The road of one kvbm, as it reads. `hello` says what it is to others; `start` starts a process, in a thread."""

    def __init__(self, config: PeersConfig, hello: Callable[[], PeerHello], start: Callable[[], NixlProcess]) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots: dict[str, ArenaMap] = {}
        self._start = start
        self._connections = PeerConnections(config, None, hello)
        self._first: asyncio.Task[None] | None = None
        self.idle: list[NixlProcess] = []
        """Processes that serve no read; at most as many as there may be reads."""

    # --- the contract

    def register(self, layout: StoreLayout, slots: ArenaMap) -> None:
        """Let blocks of the layout be read into these slots. NIXL has the whole pool registered."""
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
            stream = await self._connections.connected(peer, layout, parts)
            process = await self._process(peer, parts)  # before the loan begins, since a start may take a second
            lent, epoch = await self._connections.borrow(peer, stream, layout, keys)
            if not lent.blocks:
                self._connections.keep(peer, stream, parts)
                self._keep(process, parts)
                return ReadBlocks({}, 0, self._loop.time() - began_s, None)
            places = place(lent.blocks)
            assert len(places) == len(lent.blocks), "a place, or none, for each block"
            wanted = {index: slot for index, slot in enumerate(places) if slot is not None}
            written: dict[int, int] = {}
            fault: PeerFault | None = None
            began_s = self._loop.time()
            if wanted:
                try:
                    located = await self._locate(stream, epoch, lent, list(wanted))
                    await self._pull(process, layout, list(wanted.values()), located, written)
                    self._keep(process, parts)
                    await self._connections.in_thread(_received, stream)
                    if len(written) < len(wanted):
                        fault = PeerFault("checksum", f"{len(wanted) - len(written)} blocks came as others")
                except PeerFault as wrong:
                    fault = wrong
            else:
                self._keep(process, parts)
            took_s = self._loop.time() - began_s
            if fault is None or fault.code == "checksum":
                await self._connections.give_back(peer, stream, lent.loan, parts)
            if parts.late and fault is not None:
                fault = PeerFault("late", f"not all blocks came in time: {fault}")
            return ReadBlocks(written, len(lent.blocks), took_s, fault)

    def gone(self, instance: str) -> None:
        """End all that is under way with a peer that has left."""
        self._connections.gone(instance)

    def open(self) -> None:
        """Start the process of the first read."""
        self._first = asyncio.create_task(self._start_first())

    async def close(self) -> None:
        """End the connections, threads and processes, after all reads."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
        self._connections.close()
        while self.idle:
            await asyncio.to_thread(self.idle.pop().close)

    async def _start_first(self) -> None:
        with suppress(PeerFault):  # the first read tries again, and reports it
            process = await self._connections.in_thread(self._start)
            try:
                await self._connections.in_thread(NixlProcess.begin, process)
            except BaseException:
                process.close()
                raise
            self.idle.append(process)

    # --- one read

    async def _locate(self, stream: PeerStream, epoch: int, lent: Lent, indices: list[int]) -> Located:
        number = stream.next_number()
        answer = await self._connections.ask(stream, Locate(number, epoch, lent.loan, indices))
        return check_located(answer, number, len(indices))

    async def _pull(
        self,
        process: NixlProcess,
        layout: StoreLayout,
        slots: list[int],
        located: Located,
        written: dict[int, int],
    ) -> None:
        """Read the blocks into the slots; note those that came whole. Raise PeerFault."""
        arena = self._slots[layout.digest].arena
        offsets = [arena.offset_of(slot) for slot in slots]
        order = Pull(located.metadata, located.addresses, offsets, layout.kv.block_bytes)
        await self._connections.in_thread(_pull_all, process, order, slots, located.checksums, written)

    def _keep(self, process: NixlProcess, parts: ReadParts) -> None:
        """Keep a process on which nothing is under way."""
        if not parts.late:
            parts.remove(process)
            self.idle.append(process)

    async def _process(self, peer: PeerAddress, parts: ReadParts) -> NixlProcess:
        """Return a process for a read, which is a part of it. Raise PeerFault."""
        if self._first is not None and not self._first.done():
            await asyncio.wait([self._first])
        while self.idle:
            process = self.idle.pop()
            if not process.ended:
                parts.add(process, self._connections.busy_with(peer))
                return process
            process.close()
        process = await self._connections.in_thread(self._start)
        parts.add(process, self._connections.busy_with(peer))
        await self._connections.in_thread(NixlProcess.begin, process)
        return process


# --- in threads


def _pull_all(
    process: NixlProcess, order: Pull, slots: list[int], checksums: list[int], written: dict[int, int]
) -> None:
    """Have all blocks read; note those whose checksum is right. Raise PeerFault; then the process has ended."""
    process.ask(order)
    at = 0
    while at < len(slots):
        report = process.receive()
        assert isinstance(report, Pulled), report
        for checksum in report.checksums:
            if checksum == checksums[at]:
                written[slots[at]] = checksum
            at += 1


def _received(stream: PeerStream) -> None:
    stream.send_frame(PEER_QUESTION.encode(Received()))
