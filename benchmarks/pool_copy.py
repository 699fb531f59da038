"""How fast does an engine copy blocks into and out of kvbm's pool, as a share of plain memcpy?

A pool is made and prefaulted as the kvbm does it; then it is mapped a second time, as an engine maps it, and blocks are
copied (libc's memmove) in random order between private memory and the slots, and between two pieces of private memory
for comparison, all interleaved. `first` is the first copy into slots whose pages the engine has not touched; `touched`
the same after `shared.pool_map.touch`.

What could mislead: one thread of a shared machine, CPU time, medians of interleaved passes. The private memory asks for
huge pages, as large NumPy arrays do; a tmpfs has them only where it is mounted with `huge=within_size` or `always`, so
the two sides differ unless `--directory` lies on such a mount. Both are page-aligned, as an engine's blocks should be:
where they lie 16 bytes apart modulo 4096, as NumPy's own arrays do, the rate can be half (a CPU takes loads and stores
with the same low 12 bits for the same place).

    python -m benchmarks.pool_copy [--directory /dev/shm] [--mib 512] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec

from benchmarks.report import Goal, report
from services.kvbm.host_pool import HostPool
from shared.pool_format import Arena
from shared.pool_map import ArenaMap, PoolMap, touch

BLOCK_KIB = (256, 512, 1024, 2048, 4096)
PASSES = 9
GOAL = 0.8
GIB = 1 << 30


class Row(msgspec.Struct, frozen=True):
    """One size of blocks: plain memcpy's rate, the others as shares of it, and what touching a GiB takes."""

    block_kib: int
    plain_gib_s: float
    into: float
    out_of: float
    first: float
    touched: float
    touch_s_a_gib: float
    prefault_s_a_gib: float
    """CPU of the kvbm, for the whole pool once."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", type=int, default=512, help="size of the pool")
    parser.add_argument("--quick", action="store_true", help="a pool of 128 MiB")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    size_bytes = (128 if flags.quick else flags.mib) << 20
    with tempfile.TemporaryDirectory(prefix="pool-copy-", dir=flags.directory) as directory:
        rows = measure(Path(directory), size_bytes)
    shares = {"into": min(row.into for row in rows), "out of": min(row.out_of for row in rows)}
    goals = [
        Goal(f"{way} slots, worst size", share, "of plain memcpy", GOAL, met=share >= GOAL)
        for way, share in shares.items()
    ]
    if flags.json:
        print(msgspec.json.encode(report("pool_copy", sys.argv[1:], goals, rows)).decode())
        return 0
    print("   ".join(Row.__struct_fields__))
    for row in rows:
        values = zip(Row.__struct_fields__, msgspec.structs.astuple(row), strict=True)
        print("   ".join(f"{value:>{len(name)}.{0 if name == 'block_kib' else 2}f}" for name, value in values))
    for goal in goals:
        print(f"{goal.name}: {goal.value:.2f} {goal.unit} (goal: {goal.goal}; {'met' if goal.met else 'not met'})")
    return 0


def measure(directory: Path, size_bytes: int) -> list[Row]:
    """One row a size of blocks, in a pool of its own."""
    pool = HostPool.open(directory, size_bytes)
    try:
        prefault_s = _prefault(pool) / (pool.geometry.file_bytes / GIB)
        with _private(size_bytes // 2) as source, _private(size_bytes // 2) as target:
            return [_row(pool, kib, source, target, prefault_s) for kib in BLOCK_KIB]
    finally:
        pool.close()


def _prefault(pool: HostPool) -> float:
    ended = threading.Event()
    began_s = time.process_time()
    prefault = pool.prefault(1, ended.set)
    prefault.start()
    ended.wait()
    prefault.stop()
    if prefault.failure:
        raise SystemExit(f"{pool.path}: {prefault.failure}")
    return time.process_time() - began_s


def _row(pool: HostPool, block_kib: int, source: memoryview, target: memoryview, prefault_s: float) -> Row:
    """Slots are taken from the whole arena; as many blocks are copied as private memory has room for."""
    block_bytes = block_kib << 10
    arena = pool.geometry.arena(0, 1, block_bytes)
    numbers = Random(block_kib)
    count = min(arena.slots, source.nbytes // block_bytes)
    sources, targets = (_shuffled(numbers, memory, block_bytes, count) for memory in (source, target))
    with _mapped(pool.path, arena) as slots:
        first_s = _seconds(_shuffled(numbers, slots.bytes, block_bytes, count), sources, block_bytes)
    with _mapped(pool.path, arena) as slots:
        began_s = time.process_time()
        touch(slots.bytes)
        touch_s = time.process_time() - began_s
        places = _shuffled(numbers, slots.bytes, block_bytes, count)
        touched_s = _seconds(places, sources, block_bytes)
        passes = [
            (
                _seconds(targets, sources, block_bytes),
                _seconds(places, sources, block_bytes),
                _seconds(targets, places, block_bytes),
            )
            for _ in range(PASSES)
        ]
    plain_s, into_s, out_of_s = (statistics.median(seconds) for seconds in zip(*passes, strict=True))
    return Row(
        block_kib=block_kib,
        plain_gib_s=count * block_bytes / GIB / plain_s,
        into=plain_s / into_s,
        out_of=plain_s / out_of_s,
        first=plain_s / first_s,
        touched=plain_s / touched_s,
        touch_s_a_gib=touch_s / (arena.size_bytes / GIB),
        prefault_s_a_gib=prefault_s,
    )


@contextmanager
def _private(size_bytes: int) -> Iterator[memoryview]:
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(mapping) as memory:
            touch(memory)
            yield memory


@contextmanager
def _mapped(path: Path, arena: Arena) -> Iterator[ArenaMap]:
    """The slots as an engine that has just attached has them."""
    pool = PoolMap(path)
    slots = pool.arena(arena)
    yield slots
    slots.close()
    pool.close()


def _shuffled(numbers: Random, memory: memoryview, block_bytes: int, count: int) -> list[int]:
    """Addresses of `count` of its blocks."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return [start + block_bytes * n for n in numbers.sample(range(memory.nbytes // block_bytes), count)]


def _seconds(targets: Sequence[int], sources: Sequence[int], block_bytes: int) -> float:
    """CPU time of copying all blocks."""
    began_s = time.process_time()
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target, source, block_bytes)
    return time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(main())
