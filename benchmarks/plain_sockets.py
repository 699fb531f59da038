"""A plain loop over TCP between two processes: the second yardstick of `kvbm_peers` with sockets.

As iperf3, it has a thread for each connection and does nothing with what comes: no kvbm, no checksum, no questions. But
each byte is sent from its own place in one process's memory, and received into its own place in the other's, as blocks
are. iperf3 sends one small piece again and again, and drops what comes, all of it in the cores' caches.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

READ_BYTES = 256 << 20
PIECE_BYTES = 1 << 18
TURN_S = 1


@contextmanager
def running(directory: Path, streams: int) -> Iterator[Connection]:
    """Run both processes; for each word on the connection comes a rate in GB/s and the CPU seconds for a GB."""
    spawn = multiprocessing.get_context("spawn")
    (to_sender, sender_end), (to_reader, reader_end) = spawn.Pipe(), spawn.Pipe()
    sender = spawn.Process(target=_send, args=(sender_end, directory / "plain-sender", streams))
    reader = spawn.Process(target=_read, args=(reader_end, to_sender, directory / "plain-reader", streams))
    sender.start()
    reader.start()
    try:
        yield to_reader
    finally:
        sender.kill()
        reader.kill()


def _memory(file: Path, streams: int) -> list[memoryview]:
    """Return the part of READ_BYTES of a file that each stream has."""
    with file.open("wb+") as opened:
        opened.truncate(READ_BYTES)
        mapping = mmap.mmap(opened.fileno(), READ_BYTES)
    for at in range(0, READ_BYTES, 1 << 20):
        mapping[at : at + (1 << 20)] = bytes([at >> 20]) * (1 << 20)
    part = READ_BYTES // streams
    return [memoryview(mapping)[at : at + part] for at in range(0, part * streams, part)]


def _send(ends: Connection, file: Path, streams: int) -> None:
    memory = _memory(file, streams)
    with socket.create_server(("127.0.0.1", 0)) as door:
        ends.send(door.getsockname()[1])
        connected = [door.accept()[0] for _ in range(streams)]
    with ThreadPoolExecutor(streams) as threads:
        while True:
            if ends.recv() == "read":
                list(threads.map(socket.socket.sendall, connected, memory))
            else:
                ends.send(time.process_time())


def _receive(connected: socket.socket, memory: memoryview) -> None:
    for at in range(0, len(memory), PIECE_BYTES):
        left = memory[at : at + PIECE_BYTES]
        while left:
            left = left[connected.recv_into(left, len(left), socket.MSG_WAITALL) :]


def _read(ends: Connection, sender: Connection, file: Path, streams: int) -> None:
    memory = _memory(file, streams)
    port = sender.recv()
    connected = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]

    def cpu_s() -> float:
        sender.send("cpu")
        return float(sender.recv()) + time.process_time()

    with ThreadPoolExecutor(streams) as threads:
        while True:
            ends.recv()
            before_s, began_s, done = cpu_s(), time.perf_counter(), 0
            while time.perf_counter() - began_s < TURN_S:
                sender.send("read")
                list(threads.map(_receive, connected, memory))
                done += READ_BYTES
            took_s = time.perf_counter() - began_s
            ends.send((done / 1e9 / took_s, (cpu_s() - before_s) / (done / 1e9)))
