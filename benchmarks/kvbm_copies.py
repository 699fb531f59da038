"""How fast does an engine's mover copy blocks into and out of kvbm's pool, as a share of plain memcpy?

A pool is made and prefaulted as kvbm does it, and mapped a second time, as an engine maps it. Then the native CPU
engine's mover copies blocks in random order between private memory and the slots, in its own thread, as in the engine.
`stored` and `loaded` are its rates as shares of libc's memmove between two pieces of private memory. `first` is the
share of storing into slots whose pages the engine has not touched. `touch` is the time to touch them all beforehand.

What could mislead: the figures are CPU time of the process, medians of interleaved passes, with nothing else running;
benchmarks.kvbm_steps has an engine that computes meanwhile. The private memory uses huge pages, as the engine's KV
pages do. A tmpfs has them only if it is mounted with `huge=within_size` or `always`, so the two sides differ unless
`--directory` lies on such a mount.

    python -m benchmarks.kvbm_copies [--directory /dev/shm] [--mib 512] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from random import Random

import msgspec

from benchmarks.report import Goal, report
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import make_memory
from services.worker.contracts.mover import Copy, Mover
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.mover import TransferMover
from shared.pool.format import Arena
from shared.pool.map import ArenaMap, PoolMap, touch

BLOCK_KIB = (256, 512, 1024, 2048, 4096)
PASSES = 9
GOAL = 0.8
GIB = 1 << 30


class CopyRateRow(msgspec.Struct, frozen=True):
    """The rates of one block size: plain memcpy's, the others as shares of it, and the time to touch a GiB."""

    block_kib: int
    plain_gib_s: float
    stored: float
    loaded: float
    first: float
    touch_s_a_gib: float
    prefault_s_a_gib: float
    """CPU seconds of kvbm for each GiB, once for the pool."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--mib", type=int, default=512, help="size of the pool")
    parser.add_argument("--quick", action="store_true", help="a pool of 128 MiB")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = measure(flags.directory, (128 if flags.quick else flags.mib) << 20)
    if flags.json:
        print(msgspec.json.encode(report("kvbm_copies", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    print("   ".join(CopyRateRow.__struct_fields__))
    for row in rows:
        values = zip(CopyRateRow.__struct_fields__, msgspec.structs.astuple(row), strict=True)
        print("   ".join(f"{value:{len(name)}.{0 if name == 'block_kib' else 2}f}" for name, value in values))
    return 0


def goals(rows: Sequence[CopyRateRow]) -> list[Goal]:
    """Compare the worst block size with the goals."""
    shares = {"stored": min(row.stored for row in rows), "loaded": min(row.loaded for row in rows)}
    return [
        Goal(f"blocks {way}, worst size", share, "of plain memcpy", GOAL, met=share >= GOAL)
        for way, share in shares.items()
    ]


def measure(directory: Path, size_bytes: int) -> list[CopyRateRow]:
    """Return a row for each block size, in a pool of `size_bytes` below `directory`."""
    with tempfile.TemporaryDirectory(prefix="kvbm-copies-", dir=directory) as below:
        pool = HostPool.open(Path(below), size_bytes)
        try:
            prefault_s = _prefault(pool) / (pool.geometry.file_bytes / GIB)
            with _private(size_bytes // 2) as device, _private(size_bytes // 2) as other:
                return [_row(pool, kib, device, other, prefault_s) for kib in BLOCK_KIB]
        finally:
            pool.close()


def _prefault(pool: HostPool) -> float:
    """Prefault the pool; return the seconds of CPU."""
    began_s = time.process_time()
    try:
        make_memory(pool.descriptor, 0, pool.geometry.file_bytes)
    except OSError as wrong:
        raise SystemExit(f"{pool.path}: {wrong.strerror}") from None
    return time.process_time() - began_s


def _row(pool: HostPool, block_kib: int, device: memoryview, other: memoryview, prefault_s: float) -> CopyRateRow:
    """Measure one block size, on slots of the whole arena and as many blocks as private memory holds."""
    block_bytes = block_kib << 10
    arena = pool.geometry.arena(0, 1, block_bytes)
    draw = Random(block_kib)
    blocks = min(arena.slots, device.nbytes // block_bytes)

    def copies() -> list[Copy]:
        slots = zip(draw.sample(range(arena.slots), blocks), draw.sample(range(blocks), blocks), strict=True)
        return [Copy(pool_slot, device_slot) for pool_slot, device_slot in slots]

    with _mapped(pool.path, arena) as slots, _moving(device, block_bytes, slots) as mover:
        first_s = _save(mover, copies())
    with _mapped(pool.path, arena) as slots:
        began_s = time.process_time()
        touch(slots.bytes)
        touch_s = time.process_time() - began_s
        with _moving(device, block_bytes, slots) as mover:
            passes = [
                (_plain(other, device, block_bytes, copies()), _save(mover, copies()), _load(mover, copies()))
                for _ in range(PASSES)
            ]
    plain_s, stored_s, loaded_s = (statistics.median(seconds) for seconds in zip(*passes, strict=True))
    return CopyRateRow(
        block_kib=block_kib,
        plain_gib_s=blocks * block_bytes / GIB / plain_s,
        stored=plain_s / stored_s,
        loaded=plain_s / loaded_s,
        first=plain_s / first_s,
        touch_s_a_gib=touch_s / (arena.size_bytes / GIB),
        prefault_s_a_gib=prefault_s,
    )


def _plain(target: memoryview, source: memoryview, block_bytes: int, copies: Sequence[Copy]) -> float:
    """Return the CPU seconds of the same copies between two pieces of private memory."""
    to, at = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    began_s = time.process_time()
    for copy, reverse in zip(copies, reversed(copies), strict=True):
        ctypes.memmove(to + reverse.device_slot * block_bytes, at + copy.device_slot * block_bytes, block_bytes)
    return time.process_time() - began_s


def _save(mover: Mover, copies: Sequence[Copy]) -> float:
    began_s = time.process_time()
    mover.save(0, copies, inf)
    return _ended(mover, began_s)


def _load(mover: Mover, copies: Sequence[Copy]) -> float:
    began_s = time.process_time()
    mover.load(0, copies)
    return _ended(mover, began_s)


def _ended(mover: Mover, began_s: float) -> float:
    """Wait for the batch; return the CPU seconds since `began_s`."""
    select.select([mover], [], [])
    [copied] = mover.ended()
    seconds = time.process_time() - began_s
    assert all(copied.good)
    return seconds


@contextmanager
def _moving(device: memoryview, block_bytes: int, slots: ArenaMap) -> Iterator[Mover]:
    with closing(TransferMover(HostCopier.over(device, block_bytes), time.monotonic)) as mover:
        mover.attach(slots)
        yield mover


@contextmanager
def _private(size_bytes: int) -> Iterator[memoryview]:
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(mapping) as memory:
            touch(memory)
            yield memory


@contextmanager
def _mapped(path: Path, arena: Arena) -> Iterator[ArenaMap]:
    """Map the slots as an engine that has just attached does."""
    pool = PoolMap(path)
    slots = pool.arena(arena)
    yield slots
    slots.close()
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
