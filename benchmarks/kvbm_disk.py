"""How close does the disk tier come to plain O_DIRECT requests of the same size and number in flight?

Ours: `Disk.write` and `Disk.read` from an event loop, header page and checksums included, to random records that have
been written before. The yardstick: as many threads, each with `os.pwrite` or `os.pread` of the payload alone between
aligned memory of its own and random places of an allocated file, which is what fio's psync engine does. Depth is how
many requests are in flight, and threads, on either side. They take turns, a round each; the ratio is the median over
the rounds' ratios. `scan` is how many headers a second are read at the start.

What could mislead: both run in Python, and on few cores the loop, the threads and the disk's own interrupts share them,
so with small requests on a fast disk the ratio is about CPU. A disk that other programs use moves by 20 % and more
between rounds. A record is a page longer than its payload: 1.6 % of 256 KiB. Virtual disks may cache what they were
just given. With one request in flight the checksum adds to each request's time; with more it overlaps with the others.

    python -m benchmarks.kvbm_disk [--quick] [--json] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal

import msgspec
import uvloop

from benchmarks.report import Goal, report
from services.kvbm.disk.disk import Disk
from services.kvbm.disk.format import DiskGeometry, disk_geometry
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.tiers.disk_records import DiskFailure, FoundBlock, LoadedFromDisk, WrittenToDisk
from shared.blocks import Content

KIB = 1024
SIZES = (256 * KIB, 1024 * KIB, 4096 * KIB)
DEPTHS = (1, 8)
QUEUED = 4
"""Our requests that wait or run, for each thread; and buffers of each of the yardstick's threads."""
FILE_BYTES = 512 << 20
RATIO_GOAL = 0.8
LAYOUT = "00112233445566ff"

Way = Literal["write", "read"]
Row = dict[str, Any]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="half the time a round, fewer rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--directory", type=Path, help="where to write 1 GiB; default: a new one in the temporary directory"
    )
    flags = parser.parse_args()
    rows = measure(flags.directory, quick=flags.quick)
    if flags.json:
        print(msgspec.json.encode(report("kvbm_disk", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(
            "   ".join(
                f"{name} {value:,.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    return 0


def measure(directory: Path | None, *, quick: bool) -> list[Row]:
    """Return rows for each block size, direction and number in flight, and for the scan."""
    seconds, rounds = (0.3, 3) if quick else (0.8, 7)
    with tempfile.TemporaryDirectory(dir=directory) as below:
        return [row for size in SIZES for row in uvloop.run(_size(Path(below), size, seconds, rounds))]


def goals(rows: list[Row]) -> list[Goal]:
    """Compare the rows with the goals."""
    ratios = [
        (f"{row['way']} {row['KiB']} KiB, {row['in flight']} in flight", row["ratio"]) for row in rows if "ratio" in row
    ]
    return [
        Goal(f"{name}: share of plain O_DIRECT", ratio, "of 1", RATIO_GOAL, ratio >= RATIO_GOAL)
        for name, ratio in ratios
    ]


async def _size(directory: Path, size_bytes: int, seconds: float, rounds: int) -> list[Row]:
    shape = disk_geometry(LAYOUT, size_bytes, FILE_BYTES, FILE_BYTES)
    rows: list[Row] = []
    with Plain(directory / "plain", shape) as plain:
        for depth in DEPTHS:
            async with asyncio.TaskGroup() as tasks:
                ours = Ours(directory, shape, depth)
                life = tasks.create_task(ours.disk.run())
                scanned_in_s = await ours.up()
                if depth == DEPTHS[0]:
                    await ours.fill()
                for way in ("write", "read"):
                    pairs = [
                        (await ours.rate(way, seconds), await plain.rate(way, depth, seconds)) for _ in range(rounds)
                    ]
                    rows.append(
                        {
                            "KiB": size_bytes // KIB,
                            "way": way,
                            "in flight": depth,
                            "MB/s": median(our for our, _ in pairs) / 1e6,
                            "plain MB/s": median(their for _, their in pairs) / 1e6,
                            "ratio": median(our / their for our, their in pairs),
                        }
                    )
                life.cancel()
            await ours.threads.close(10.0)
            if depth == DEPTHS[-1]:
                rows.append({"KiB": size_bytes // KIB, "way": "scan", "records/s": shape.capacity / scanned_in_s})
    for path in (directory / LAYOUT).iterdir():
        path.unlink()
    return rows


class Ours:
    """Our disk tier, with a number of requests in flight."""

    def __init__(self, directory: Path, shape: DiskGeometry, depth: int) -> None:
        self._lanes = QUEUED * depth
        self.threads = DiskThreads(depth, self._lanes)
        self._on: asyncio.Future[list[FoundBlock]] = asyncio.get_running_loop().create_future()
        self.disk = Disk(directory, shape, self.threads, self._on.set_result, print)
        self._shape = shape
        self._memory = [memoryview(mmap.mmap(-1, shape.memory_bytes)) for _ in range(self._lanes)]
        for memory in self._memory:
            memory[:] = Random(1).randbytes(len(memory))

    async def up(self) -> float:
        """Start the tier; return the seconds until it is on."""
        start_s = time.perf_counter()
        await self._on
        return time.perf_counter() - start_s

    async def fill(self) -> None:
        """Write every record once."""
        for record in range(self._shape.capacity):
            await self._once("write", record, 0)

    async def rate(self, way: Way, seconds: float) -> float:
        """Measure the payload's bytes per second."""
        draw = Random(2)
        start_s = time.perf_counter()
        done = 0

        async def lane(index: int) -> None:
            nonlocal done
            while time.perf_counter() - start_s < seconds:
                # Lanes keep to records of their own, as the tiers' bookkeeping does.
                record = draw.randrange(self._shape.capacity // self._lanes) * self._lanes + index
                await self._once(way, record, index)
                done += 1

        await asyncio.gather(*(lane(index) for index in range(self._lanes)))
        return done * self._shape.payload_bytes / (time.perf_counter() - start_s)

    async def _once(self, way: Way, record: int, index: int) -> None:
        key = record.to_bytes(16, "little")
        ended: asyncio.Future[WrittenToDisk | LoadedFromDisk | DiskFailure] = asyncio.get_running_loop().create_future()
        if way == "write":
            self.disk.write(record, Content(key, None, bytes(64)), self._memory[index], ended.set_result)
        else:
            self.disk.read(record, key, self._memory[index], ended.set_result)
        outcome = await ended
        if isinstance(outcome, DiskFailure):
            raise RuntimeError(f"{way} of record {record}: {outcome.reason}: {outcome.detail}")


class Plain:
    """Threads that read or write at random places of a file."""

    def __init__(self, path: Path, shape: DiskGeometry) -> None:
        self._path = path
        self._shape = shape

    def __enter__(self) -> Plain:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, self._shape.capacity * self._shape.record_bytes)
        memory = self._filled()
        for record in range(self._shape.capacity):
            os.pwrite(self._file, memory, record * self._shape.record_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._path.unlink()

    async def rate(self, way: Way, depth: int, seconds: float) -> float:
        """Measure the bytes per second."""
        return await asyncio.to_thread(self._rate, way, depth, seconds)

    def _rate(self, way: Way, depth: int, seconds: float) -> float:
        done = [0] * depth
        memories = [[self._filled() for _ in range(QUEUED)] for _ in range(depth)]

        def lane(index: int) -> None:
            draw = Random(index)
            while time.perf_counter() - start_s < seconds:
                place = draw.randrange(self._shape.capacity) * self._shape.record_bytes
                memory = memories[index][done[index] % QUEUED]
                if way == "write":
                    os.pwrite(self._file, memory, place)
                else:
                    os.preadv(self._file, [memory], place)
                done[index] += 1

        threads = [threading.Thread(target=lane, args=(index,)) for index in range(depth)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) * self._shape.payload_bytes / (time.perf_counter() - start_s)

    def _filled(self) -> mmap.mmap:
        memory = mmap.mmap(-1, self._shape.memory_bytes)
        memory[:] = Random(1).randbytes(len(memory))
        return memory


if __name__ == "__main__":
    sys.exit(main())
