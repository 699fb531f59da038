"""DeviceExchange: sums and logits of a step, which the ranks of a group exchange from GPU to GPU within its kernels.

    own memory: rooms for all peers ── descriptor ──▶ each peer maps it, and its kernels write there
    a step's kernels … sum_parts … sum_parts … join_columns          `kernels/ranks.cu` says how

All ranks make the same calls in the same order, of the same sizes. Nothing here waits for the device but `check`'s
caller, so that the calls can be captured in CUDA graphs: which call it is, the device counts itself.

A peer that ends hangs up; a thread sees that, and has the kernels wait no longer. One that stands still ends them at
their limit. Either way the step's numbers are worthless then, and `check` says which rank was lost.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.linear import Array
from services.worker.native.parallel.peers import Peers
from services.worker.native.parallel.shares import MOST_RANKS
from services.worker.sharing.device_pages import DeviceMapper, DevicePages
from services.worker.sharing.driver import READ_AND_WRITE
from services.worker.sharing.packets import close_all

PLACE_BYTES = 4 << 20
"""Bytes of one sender's place in a room, unless a row of logits is longer. What is longer is exchanged in turns."""
ROOMS = 3
THREADS = 256
_SOURCE = Path(__file__).parent / "kernels" / "ranks.cu"
_GROUP = np.dtype(
    [("rooms", np.uint64, (MOST_RANKS,)), ("place_words", np.int64), ("rank", np.int32), ("ranks", np.int32)]
)
_COLUMNS = np.dtype([("begin", np.int32, (MOST_RANKS + 1,))])
_STATE_WORDS, _LIMIT = 6, 1
"""64-bit words of the kernels' State, and which of them is the limit of a wait."""
_GONE, _LOST = 0, 1
"""The words of the kernels' Host."""


def place_bytes(columns: Sequence[slice]) -> int:
    """Return the bytes of a sender's place, which holds at least one row of a rank's logits."""
    return max(PLACE_BYTES, 4 * _aligned(_widest(columns)))


def exchange_bytes(columns: Sequence[slice]) -> int:
    """Return the bytes of device memory that an exchange takes."""
    return ROOMS * len(columns) * place_bytes(columns)


class DeviceExchange:
    """One rank's part in the exchange. It belongs to one thread and one stream."""

    def __init__(self, peers: Peers, rank: int, columns: Sequence[slice], width: int, device: int) -> None:
        """Allocate the rooms, and map those of all peers, who do the same now. `columns` are each rank's part of the
        vocabulary; `width` is that of hidden states. Raise RankLost, MapFailed, DeviceFailed; DeviceMemoryExhausted."""
        self._peers, self._rank, self._columns = peers, rank, columns
        self._processors = int(cp.cuda.Device(device).attributes["MultiProcessorCount"])
        self._place_words = place_bytes(columns) // 4
        self._watch: threading.Thread | None = None
        with ExitStack() as opened:
            own = DevicePages(exchange_bytes(columns), device)
            opened.callback(own.close)
            self._state = cp.zeros(_STATE_WORDS, cp.uint64)
            self._host = pinned_array(2, np.int32)
            self._host[:] = 0
            stream = cp.cuda.get_current_stream()
            runtime.memsetAsync(own.address, 0xFF, own.size_bytes, stream.ptr)
            stream.synchronize()
            self._rooms = {rank: own.address}
            self._map(own, device, opened)
            peers.meet()  # all rooms are empty
            self._opened = opened.pop_all()
        begins = [part.start for part in columns] + [columns[-1].stop]
        self._group = np.zeros((), _GROUP)
        self._group["rooms"][: len(columns)] = [self._rooms[number] for number in range(len(columns))]
        self._group["place_words"], self._group["rank"], self._group["ranks"] = self._place_words, rank, len(columns)
        self._ends = np.zeros((), _COLUMNS)
        self._ends["begin"][: len(begins)] = begins
        self._sum_wide = 4 if width % 4 == 0 else 1
        self._join_wide = 4 if all(begin % 4 == 0 for begin in begins) else 1
        self._sum = _kernel("sum_parts", self._sum_wide)
        self._join = _kernel("join_columns", self._join_wide)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._watch = threading.Thread(target=self._watch_peers, name="peers", daemon=True)
        self._watch.start()

    def _map(self, own: DevicePages, device: int, opened: ExitStack) -> None:
        """Map the rooms of all peers."""
        uuids = self._peers.numbers(np.frombuffer(bytes.fromhex(own.device), np.int64).tolist())
        given = self._peers.descriptors(own.descriptors()[0])
        try:
            mapper = DeviceMapper(device, READ_AND_WRITE)
            for number, descriptor in given.items():
                uuid = np.array(uuids[number], np.int64).tobytes().hex()
                mapped = mapper.map([descriptor], own.size_bytes, uuid)
                opened.callback(mapped.close)
                self._rooms[number] = mapped.address
        finally:
            close_all(list(given.values()))

    def limit(self, limit_s: float) -> None:
        """Wait at most `limit_s` for a peer in each call from now on, after all work of the current stream."""
        self._state[_LIMIT : _LIMIT + 1].set(np.array([limit_s * 1e9], np.uint64))

    def add_total(self, to: Array, part: Array, factor: float) -> None:
        """Enqueue: add `factor` times the sum of all ranks' parts to `to`. Both are contiguous float32 arrays of one
        shape."""
        self._sum_up(to, part, add=True, factor=factor)

    def total(self, part: Array) -> None:
        """Enqueue: put the sum of all ranks' parts, contiguous float32 arrays of one shape, in place of `part`."""
        self._sum_up(part, part, add=False, factor=1.0)

    def _sum_up(self, to: Array, part: Array, *, add: bool, factor: float) -> None:
        to, part = to.reshape(-1), part.reshape(-1)
        for first in range(0, part.size, self._place_words):
            turn = slice(first, first + self._place_words)
            count = len(part[turn])
            arguments = (to[turn], part[turn], np.int64(count), np.int32(add), np.float32(factor))
            self._launch(self._sum, count // self._sum_wide, arguments)

    def join(self, rows: Array) -> None:
        """Enqueue: fill in the columns of all other ranks in float32 rows (rows, vocab) that have this rank's."""
        widest = _widest(self._columns)
        most = self._place_words // widest
        for first in range(0, len(rows), most):
            turn = rows[first : first + most]
            arguments = (turn, np.int32(len(turn)), self._ends, np.int32(widest))
            self._launch(self._join, len(turn) * widest // self._join_wide, arguments)

    def own(self, rows: Array) -> Array:
        """Return this rank's columns of rows (rows, vocab)."""
        return rows[:, self._columns[self._rank]]

    def _launch(self, kernel: Any, pieces: int, arguments: tuple[Any, ...]) -> None:
        blocks = max(1, min(self._processors, -(-pieces // THREADS)))
        kernel((blocks,), (THREADS,), (self._group, self._state, kernel_address(self._host), *arguments))

    def check(self) -> None:
        """Raise RankLost if a rank was lost in the work that has ended."""
        if self._host[_LOST]:
            raise self._peers.lost(int(self._host[_LOST]) - 1)

    def _watch_peers(self) -> None:
        """Note the first peer that hangs up, until `close`."""
        poll, numbers = select.poll(), {}
        poll.register(self._stop, select.POLLIN)
        for number, connection in self._peers.connections:
            poll.register(connection, 0)
            numbers[connection.fileno()] = number
        for descriptor, _ in poll.poll():
            if descriptor in numbers:
                self._host[_GONE] = numbers[descriptor] + 1
                return

    def close(self) -> None:
        """Let go of the rooms. The stream has ended its work."""
        if self._watch is not None:
            os.eventfd_write(self._stop, 1)
            self._watch.join()
            self._watch = None
            os.close(self._stop)
        self._opened.close()


def _kernel(name: str, wide: int) -> Any:
    options = ("--std=c++17", f"-DWIDE={wide}", f"-DTHREADS={THREADS}")
    return cp.RawModule(code=_SOURCE.read_text(encoding="utf-8"), options=options).get_function(name)


def _widest(columns: Sequence[slice]) -> int:
    return max(int(part.stop - part.start) for part in columns)


def _aligned(words: int) -> int:
    return -(-words // 4) * 4
