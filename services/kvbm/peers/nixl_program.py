"""A NIXL process: one agent that has the pool registered, and lends it or reads into it.

    lend   SetLending(on) ──▶ UCX serves reads ──▶ SetLending(off) ──▶ the process sleeps
    read   Pull ──▶ transfers, a few at once ──▶ each: checksums of what came ──▶ Pulled

It is a process of its own since UCX aborts its process when some peers end in the middle of a read, and since it may
write to memory after a transfer was given up: only the end of the process ends that for certain. The agent has no
progress thread of NIXL's: that spins, on both sides, and made a read half as fast for three times the CPU time.

    python -m services.kvbm.peers.nixl_program JSON
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from typing import Any

import msgspec
import nixl_cu13._api as nixl
from xxhash import xxh3_64_intdigest

from services.kvbm.peers.messages import LENGTH_BYTES, frame_length, pack_frame
from services.kvbm.peers.nixl_messages import (
    ALIVE_S,
    NIXL_ORDER,
    NIXL_REPORT,
    NixlAlive,
    NixlFailed,
    NixlOrder,
    NixlReady,
    NixlReport,
    NixlStart,
    Pull,
    Pulled,
    SetLending,
    plan_batches,
)
from shared.pool.format import HEADER_BYTES, parse

BATCH_BYTES = 1 << 22
"""The bytes of one transfer, about."""
IN_FLIGHT = 4
"""Transfers that are posted at once."""
PAUSE_S = 50e-6
"""Seconds between two looks at what has come."""
REMOTES_MOST = 64
"""Agents of other machines that are known at once."""
_MEMORY = "DRAM"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class _Control:
    """The process's end of the socket pair. Its other end closes when the kvbm ends, and then so does this process."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def pause(self) -> bool:
        """Wait for PAUSE_S at most; return whether there is an order."""
        ready, _, _ = select.select([self._socket], [], [], PAUSE_S)
        return bool(ready)

    def receive(self) -> NixlOrder:
        """Return the next order. The process ends if the kvbm has."""
        return NIXL_ORDER.decode(self._receive(frame_length(self._receive(LENGTH_BYTES))))

    def send(self, report: NixlReport) -> None:
        self._socket.sendall(pack_frame(NIXL_REPORT.encode(report)))

    def _receive(self, size_bytes: int) -> bytes:
        data = self._socket.recv(size_bytes, socket.MSG_WAITALL)
        if len(data) < size_bytes:
            os._exit(0)  # without NIXL's own end, which waits for peers
        return data


class _Agent:
    """The agent, with the slots of the pool registered."""

    def __init__(self, name: str, pool: int) -> None:
        size = os.fstat(pool).st_size
        first = parse(os.pread(pool, HEADER_BYTES, 0), size).slots_at
        self._mapping = mmap.mmap(pool, size - first, flags=mmap.MAP_SHARED, offset=first)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.base = address - first
        self._first = first
        self._memory = memoryview(self._mapping)
        config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent: Any = nixl.nixl_agent(name, config)
        self._agent.register_memory([(address, size - first, 0, "")], _MEMORY, ["UCX"])
        self._remotes: OrderedDict[bytes, str] = OrderedDict()

    @property
    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def progress(self) -> None:
        """Serve what peers have asked for."""
        self._agent.get_new_notifs()

    def remote(self, metadata: bytes) -> str:
        """Return the name of another agent, to which there is a connection from now on."""
        if metadata not in self._remotes:
            while len(self._remotes) >= REMOTES_MOST:
                self._agent.remove_remote_agent(self._remotes.popitem(last=False)[1])
            name = self._agent.add_remote_agent(metadata)
            self._remotes[metadata] = name.decode() if isinstance(name, bytes) else name
        self._remotes.move_to_end(metadata)
        return self._remotes[metadata]

    def post(self, remote: str, pull: Pull, part: range) -> Any:
        """Begin to read these blocks."""
        size = pull.block_bytes
        here = self._agent.get_xfer_descs([(self.base + pull.offsets[index], size, 0) for index in part], _MEMORY)
        there = self._agent.get_xfer_descs([(pull.addresses[index], size, 0) for index in part], _MEMORY)
        handle = self._agent.initialize_xfer("READ", here, there, remote)
        self._agent.transfer(handle)
        return handle

    def is_done(self, handle: Any) -> bool:
        """Return whether a transfer has ended. Raise NixlError if it has failed."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise NixlError("a transfer has failed")
        if state == "DONE":
            handle.release()
        return bool(state == "DONE")

    def checksum(self, offset: int, size_bytes: int) -> int:
        """Return the checksum of a part of the pool's file."""
        at = offset - self._first
        return xxh3_64_intdigest(self._memory[at : at + size_bytes])


class NixlError(Exception):
    """NIXL reports a failure without an exception of its own."""


def _lend(agent: _Agent, control: _Control) -> None:
    on, due_s = False, 0.0
    while True:
        while not on or control.pause():
            order = control.receive()
            assert isinstance(order, SetLending), order
            on = order.on
        agent.progress()
        if (now_s := time.monotonic()) >= due_s:
            control.send(NixlAlive())
            due_s = now_s + ALIVE_S


def _read(agent: _Agent, control: _Control) -> None:
    while True:
        order = control.receive()
        assert isinstance(order, Pull), order
        _pull(agent, control, order)


def _pull(agent: _Agent, control: _Control, order: Pull) -> None:
    remote = agent.remote(order.metadata)
    left = deque(plan_batches(len(order.offsets), order.block_bytes, BATCH_BYTES))
    posted: deque[tuple[Any, range]] = deque()
    while left or posted:
        while left and len(posted) < IN_FLIGHT:
            part = left.popleft()
            posted.append((agent.post(remote, order, part), part))
        handle, part = posted[0]
        if agent.is_done(handle):
            posted.popleft()
            control.send(Pulled([agent.checksum(order.offsets[index], order.block_bytes) for index in part]))
        elif control.pause():
            control.receive()  # ends the process: nothing else is said meanwhile


def main() -> None:
    """Run until the kvbm ends, or NIXL fails."""
    start = msgspec.json.decode(sys.argv[1], type=NixlStart)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # UCX may wait in a call of its own for minutes
    if os.getppid() != start.parent:
        os._exit(0)
    control = _Control(start.control)
    try:
        agent = _Agent(start.agent, start.pool)
        control.send(NixlReady(agent.metadata, agent.base))
        (_lend if start.role == "lend" else _read)(agent, control)
    except Exception as wrong:  # noqa: BLE001 - NIXL's own exceptions have no common class
        control.send(NixlFailed(f"{type(wrong).__name__}: {wrong}"[:200]))
    os._exit(1)  # what is posted must not go on


if __name__ == "__main__":
    main()
