"""A plain loop over NIXL's API between two processes: the yardstick of `kvbm_peers --backend nixl`.

One process has registered memory and waits; the other reads all of it in one transfer after another, as NIXL's own
examples do: an agent with its progress thread, and `check_xfer_state` in a loop. UCX has its own settings except the
device and the transport, which are kvbm's.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

READ_BYTES = 256 << 20
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
    os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_LOG_LEVEL="error", NIXL_LOG_LEVEL="ERROR")
    import nixl_cu13._api as nixl  # it reads the variables when it is loaded

    with file.open("wb+") as opened:
        opened.truncate(READ_BYTES)
        mapping = mmap.mmap(opened.fileno(), READ_BYTES)
    for at in range(0, READ_BYTES, 1 << 20):
        mapping[at : at + (1 << 20)] = bytes([at >> 20]) * (1 << 20)
    _kept.append(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, READ_BYTES, 0, "")], "DRAM", ["UCX"])
    return agent, address


def _lend(ends: Connection, file: Path) -> None:
    agent, address = _agent("plain-lender", file)
    ends.send((agent.get_agent_metadata(), address))
    while True:
        ends.recv()
        ends.send(time.process_time())


def _read(ends: Connection, lender: Connection, file: Path, block_bytes: int) -> None:
    agent, here = _agent("plain-reader", file)
    metadata, there = lender.recv()
    remote = agent.add_remote_agent(metadata)
    parts = range(0, READ_BYTES, block_bytes)
    ours = agent.get_xfer_descs([(here + at, block_bytes, 0) for at in parts], "DRAM")
    theirs = agent.get_xfer_descs([(there + at, block_bytes, 0) for at in parts], "DRAM")

    def cpu_s() -> float:
        lender.send(None)
        return float(lender.recv()) + time.process_time()

    while True:
        ends.recv()
        before_s, began_s, done = cpu_s(), time.perf_counter(), 0
        while time.perf_counter() - began_s < TURN_S:
            handle = agent.initialize_xfer("READ", ours, theirs, remote)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE"
            handle.release()
            done += READ_BYTES
        took_s = time.perf_counter() - began_s
        ends.send((done / 1e9 / took_s, (cpu_s() - before_s) / (done / 1e9)))
