"""How fast are the link and CUDA without our code: both directions at once, one stream or two, notices of an end?

    python -m benchmarks.gpu.raw [--quick] [--json]

`copies` copies 2 MiB pieces in random order on both sides (or one piece of 1 GiB). One thread hands them over on one or
two streams a direction, to memory that CUDA allocated (write-combined, too) and to pinned memory in /dev/shm. `rows` is
a memcpyAsync for each piece, `batch` a cuMemcpyBatchAsync for 16. Both directions carry the same bytes; the rate is the
sum of both. `ends` copies one piece after another and hands the next one over when the end of the one before is known.
It shows what each way to learn of the end adds to a thread that spins: `event` is a thread that sleeps on an event, as
our lanes do, and `host_func` is CUDA's call of a Python function that wakes the thread.

What could mislead: nothing computes meanwhile; the figures of both directions depend on the host's memory as well.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct

from benchmarks.gpu import part

PIECE_BYTES = 2 << 20
SIZE_BYTES = 1 << 30
BATCH = 16
RUNS = 5


class Copies(Struct, frozen=True):
    memory: str
    what: str
    streams: int
    """The streams of each direction."""
    save_gb_s: float
    load_gb_s: float
    both_gb_s: float


class Ends(Struct, frozen=True):
    how: str
    piece_us: float
    """The time from one piece to the next."""
    cpu_us: float
    """The CPU time of all threads in that time."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("raw", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure the copies, then how their ends are noticed."""
    rows: list[Any] = []
    memories = {"cudaHostAlloc": _allocated, "write-combined": _write_combined, "/dev/shm, pinned": _shared}
    for memory, opened in memories.items():
        with opened(SIZE_BYTES) as saves, opened(SIZE_BYTES) as loads:
            rows += _copies(memory, saves, loads, 2 if flags.quick else RUNS)
            if opened is _allocated:
                rows += _ends(saves, 200 if flags.quick else 2000)
    return part.PartReport({}, rows)


def _copies(memory: str, saves: int, loads: int, runs: int) -> list[Copies]:
    import cupy  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda import new_stream

    device = [cupy.zeros(SIZE_BYTES, cupy.uint8) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    ends = [(saves, device[0].data.ptr), (device[1].data.ptr, loads)]
    """The target and the source of each direction."""
    rows = []
    for what, issue, counts in (("1 GiB", _one, (1,)), ("rows", _rows, (1, 2)), ("batch", _batches(), (1, 2))):
        for count in counts:
            streams = [[new_stream() for _ in range(count)] for _ in range(2)]
            rates = []
            for directions in ((0,), (1,), (0, 1)):

                def work() -> None:
                    issue([(ends[way], streams[way]) for way in directions])  # noqa: B023

                taken_s = median(_timed(work, [each for pair in streams for each in pair]) for _ in range(runs))
                rates.append(len(directions) * SIZE_BYTES / taken_s / 1e9)
            rows.append(Copies(memory, what, count, *rates))
    return rows


Directions = list[tuple[tuple[int, int], list[Any]]]
"""The target, the source and the streams of each direction."""


def _one(directions: Directions) -> None:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    for (to, source), [on] in directions:
        runtime.memcpyAsync(to, source, SIZE_BYTES, runtime.memcpyDefault, on.ptr)


def _rows(directions: Directions) -> None:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    for number, (to_piece, from_piece) in enumerate(_pieces()):
        for (to, source), streams in directions:
            on = streams[number % len(streams)]
            runtime.memcpyAsync(to + to_piece, source + from_piece, PIECE_BYTES, runtime.memcpyDefault, on.ptr)


def _batches() -> Callable[[Directions], None]:
    from services.worker.transfer.memcpy_batch import MemcpyBatch

    memcpy, sizes = MemcpyBatch(), np.full(BATCH, PIECE_BYTES, np.uint64)
    pieces = np.array(_pieces(), np.int64)

    def issue(directions: Directions) -> None:
        for number in range(len(pieces) // BATCH):
            offsets = pieces[number * BATCH : (number + 1) * BATCH]
            for (to, source), streams in directions:
                on = streams[number % len(streams)]
                to_pieces, from_pieces = (np.ascontiguousarray(offsets[:, end]) for end in (0, 1))
                memcpy.copy(to_pieces + to, from_pieces + source, sizes, on)

    return issue


def _pieces() -> list[tuple[int, int]]:
    """Return the offsets of each piece's target and source."""
    draw, count = np.random.default_rng(1), SIZE_BYTES // PIECE_BYTES
    to, source = (draw.permutation(count) * PIECE_BYTES for _ in range(2))
    return list(zip(to.tolist(), source.tolist(), strict=True))


def _timed(work: Callable[[], None], streams: list[Any]) -> float:
    begun_s = time.perf_counter()
    work()
    for each in streams:
        each.synchronize()
    return time.perf_counter() - begun_s


def _ends(host: int, pieces: int) -> list[Ends]:
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda import new_stream, sleeping_event

    device, on = cupy.zeros(PIECE_BYTES, cupy.uint8), new_stream()
    done, woken = sleeping_event(), threading.Event()

    def spin() -> None:
        on.synchronize()

    def event() -> None:
        done.record(on)
        done.synchronize()

    def host_func() -> None:
        woken.clear()
        on.launch_host_func(lambda _: woken.set(), None)
        woken.wait()

    rows = []
    for wait in (spin, event, host_func):
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(pieces):
            runtime.memcpyAsync(host, device.data.ptr, PIECE_BYTES, runtime.memcpyDefault, on.ptr)
            wait()
        took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        rows.append(Ends(wait.__name__, took_s / pieces * 1e6, cpu_s / pieces * 1e6))
    return rows


@contextmanager
def _allocated(size_bytes: int) -> Iterator[int]:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    at = runtime.hostAlloc(size_bytes, 0)
    yield at
    runtime.freeHost(at)


@contextmanager
def _write_combined(size_bytes: int) -> Iterator[int]:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    at = runtime.hostAlloc(size_bytes, runtime.hostAllocWriteCombined)
    yield at
    runtime.freeHost(at)


@contextmanager
def _shared(size_bytes: int) -> Iterator[int]:
    from services.worker.transfer.cuda import register, unregister

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size_bytes)
        with mmap.mmap(file.fileno(), size_bytes) as memory:
            pages = np.frombuffer(memory, np.uint8)
            pages[:: mmap.PAGESIZE] = 1
            at = pages.ctypes.data
            register(at, size_bytes)
            yield at
            unregister(at)
            del pages


if __name__ == "__main__":
    sys.exit(main())
