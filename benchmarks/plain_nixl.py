"""A plain loop over NIXL's API between two processes: the yardstick of `kvbm_peers --backend nixl`.

One process has registered memory and serves; the other reads all of it, IN_FLIGHT transfers of BATCH_BYTES at a time.
Nothing else is done: no kvbm, no checksum. The loop is as fast as trials by hand made it: UCX has kvbm's settings, and
progress is made by loops that sleep PAUSE_S between two looks. NIXL's own progress thread, which its examples use,
spins on both sides: with it a GB took 2.7 to 2.9 s of CPU time in place of 0.6.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.kvbm.config import PeersConfig
from services.kvbm.peers.nixl_process import nixl_environment

READ_BYTES = 256 << 20
BATCH_BYTES = 4 << 20
IN_FLIGHT = 8
PAUSE_S = 50e-6
TURN_S = 1
_kept: list[mmap.mmap] = []
"""What is registered must stay mapped."""


@contextmanager
def running(directory: Path, block_kib: int) -> Iterator[Connection]:
    """Run both processes; for each word on the connection comes a rate in GB/s and the CPU seconds for a GB."""
    spawn = multiprocessing.get_context("spawn")
    (to_lender, lender_end), (to_reader, reader_end) = spawn.Pipe(), spawn.Pipe()
    lender = spawn.Process(target=_lend, args=(lender_end, directory / "plain-lender"))
    reader = spawn.Process(target=_read, args=(reader_end, to_lender, directory / "plain-reader", block_kib << 10))
    lender.start()
    reader.start()
    try:
        yield to_reader
    finally:
        lender.kill()
        reader.kill()


def _agent(name: str, file: Path) -> tuple[Any, int]:
    """Return an agent with READ_BYTES of a file registered, and their address."""
    os.environ.update(nixl_environment(PeersConfig(listen="127.0.0.1:0", backend="nixl")))
    import nixl_cu13._api as nixl  # it reads the variables when it is loaded

    with file.open("wb+") as opened:
        opened.truncate(READ_BYTES)
        mapping = mmap.mmap(opened.fileno(), READ_BYTES)
    for at in range(0, READ_BYTES, 1 << 20):
        mapping[at : at + (1 << 20)] = bytes([at >> 20]) * (1 << 20)
    _kept.append(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    config = nixl.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
    agent = nixl.nixl_agent(name, config)
    agent.register_memory([(address, READ_BYTES, 0, "")], "DRAM", ["UCX"])
    return agent, address


def _lend(ends: Connection, file: Path) -> None:
    agent, address = _agent("plain-lender", file)
    ends.send((agent.get_agent_metadata(), address))
    while True:
        ready, _, _ = select.select([ends], [], [], PAUSE_S)
        if ready:
            ends.recv()
            ends.send(time.process_time())
        agent.get_new_notifs()


def _read(ends: Connection, lender: Connection, file: Path, block_bytes: int) -> None:
    agent, here = _agent("plain-reader", file)
    metadata, there = lender.recv()
    remote = agent.add_remote_agent(metadata)
    batch_bytes = max(BATCH_BYTES, block_bytes)

    def post(first: int) -> Any:
        parts = range(first, min(first + batch_bytes, READ_BYTES), block_bytes)
        ours = agent.get_xfer_descs([(here + at, block_bytes, 0) for at in parts], "DRAM")
        theirs = agent.get_xfer_descs([(there + at, block_bytes, 0) for at in parts], "DRAM")
        handle = agent.initialize_xfer("READ", ours, theirs, remote)
        agent.transfer(handle)
        return handle

    def cpu_s() -> float:
        lender.send(None)
        return float(lender.recv()) + time.process_time()

    while True:
        ends.recv()
        before_s, began_s, done = cpu_s(), time.perf_counter(), 0
        while time.perf_counter() - began_s < TURN_S:
            left = deque(range(0, READ_BYTES, batch_bytes))
            posted: deque[Any] = deque()
            while left or posted:
                while left and len(posted) < IN_FLIGHT:
                    posted.append(post(left.popleft()))
                state = agent.check_xfer_state(posted[0])
                assert state != "ERR"
                if state == "DONE":
                    posted.popleft().release()
                else:
                    time.sleep(PAUSE_S)
            done += READ_BYTES
        took_s = time.perf_counter() - began_s
        ends.send((done / 1e9 / took_s, (cpu_s() - before_s) / (done / 1e9)))
