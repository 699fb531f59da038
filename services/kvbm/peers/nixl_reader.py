"""The back end over NIXL: a NIXL process reads lent blocks into this pool.

    read ──▶ Locate: where they lie, and their checksums ──▶ Pull, in a NIXL process ──▶ each block's checksum is
             compared ──▶ Received
    a deadline, a fault, `gone`, a cancellation ──▶ the process is killed ──▶ read returns when it has ended

A process serves one read at a time, and is kept for the next one if all of it came.

NIXL runs in processes of its own since UCX ended the process of a lender whose reader gave up, and wrote to memory
after a transfer had been given up. Only the end of the process proves that nothing writes any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from services.kvbm.peers.connections import PeerConnections, ReadParts
from services.kvbm.peers.messages import (
    PEER_QUESTION,
    Locate,
    Located,
    PeerAddress,
    PeerFault,
    Received,
    check_located,
)
from services.kvbm.peers.nixl_messages import Pull, Pulled
from services.kvbm.peers.nixl_process import NixlProcess
from services.kvbm.peers.road import BorrowedBlocks
from services.kvbm.peers.stream import PeerStream


class NixlReader:
    """The NIXL processes of one kvbm that read. `start` starts one, in a thread."""

    def __init__(self, connections: PeerConnections, start: Callable[[], NixlProcess]) -> None:
        self._connections = connections
        self._start = start
        self._first: asyncio.Task[None] | None = None
        self.idle: list[NixlProcess] = []
        """Processes that serve no read; at most as many as there may be reads."""

    def open(self) -> None:
        """Start the process of the first read."""
        self._first = asyncio.create_task(self._start_first())

    async def close(self) -> None:
        """End the processes, after all reads."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
        while self.idle:
            await asyncio.to_thread(self.idle.pop().close)

    async def _start_first(self) -> None:
        with suppress(PeerFault):  # the first read tries again, and reports it
            process = await self._connections.in_thread(self._start)
            try:
                await self._connections.in_thread(NixlProcess.begin, process)
            except BaseException:
                await self._connections.closed([process])
                raise
            self.idle.append(process)

    # --- one read

    async def prepare(self, peer: PeerAddress, parts: ReadParts) -> None:
        """Start a process if none is idle, since that may take a second. Raise PeerFault."""
        self._keep(await self._process(peer, parts), parts)

    async def read(self, borrowed: BorrowedBlocks) -> None:
        """Have the blocks read by a process. If it fails, it has ended."""
        parts, stream, slots = borrowed.parts, borrowed.stream, list(borrowed.places.values())
        try:
            process = await self._process(borrowed.peer, parts)
            located = await self._locate(borrowed)
            arena = borrowed.slots.arena
            offsets = [arena.offset_of(slot) for slot in slots]
            order = Pull(located.metadata, located.addresses, offsets, borrowed.layout.kv.block_bytes)
            await self._connections.in_thread(_pull_all, process, order, slots, located.checksums, borrowed.written)
            self._keep(process, parts)
            await self._connections.in_thread(_received, stream)
        except PeerFault as wrong:
            borrowed.fault = wrong
            return
        parts.whole.add(stream)
        if missing := len(slots) - len(borrowed.written):
            borrowed.fault = PeerFault("checksum", f"{missing} blocks came as others")

    async def _locate(self, borrowed: BorrowedBlocks) -> Located:
        number = borrowed.stream.next_number()
        ask = Locate(number, borrowed.epoch, borrowed.loan, list(borrowed.places))
        return check_located(await self._connections.ask(borrowed.stream, ask), number, len(borrowed.places))

    def _keep(self, process: NixlProcess, parts: ReadParts) -> None:
        """Keep a process on which nothing is under way."""
        if not parts.late:
            parts.remove(process)
            self.idle.append(process)

    async def _process(self, peer: PeerAddress, parts: ReadParts) -> NixlProcess:
        """Return a process for a read, which is a part of it. Raise PeerFault."""
        if self._first is not None and not self._first.done():
            await asyncio.wait([self._first])
        busy = self._connections.busy_with(peer)
        while self.idle:
            process = self.idle.pop()
            if not process.ended:
                parts.add(process, busy)
                return process
            process.close()  # it has ended, so this does not wait
        process = await self._connections.in_thread(self._start)
        parts.add(process, busy)
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
