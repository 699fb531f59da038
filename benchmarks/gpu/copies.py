"""How fast do blocks go between a GPU and a kvbm's pool, against plain copies over the same link?

    python -m benchmarks.gpu.copies [--path NAME] [--memory TMPFS] [--quick] [--json]

Blocks lie scattered on both sides and are copied as in an engine: by a mover over a CudaCopier, on the path that
it chooses (or --path), in batches of 8, 64 and 512.

    in a row    all batches are requested from the mover at once, so that the link never waits for a request
    copied      one batch at a time by the copier itself, from handing it over to its end
    `told`      one batch at a time by the mover, from the request to its report: with the trips from thread to thread

The last two are medians. `both` is loads and saves at once. Yardsticks of the same run and pool are one plain
cudaMemcpyAsync of 1 GiB each way, two at once, and two rows of bare copies of 2 MiB from places as scattered as the
blocks.

What could mislead: all of the pool is touched and pinned before anything is timed, which takes 0.6 s a GiB once.
Nothing computes during the copies (`benchmarks.gpu.beside` measures that). The goals are for blocks of 2 MiB, in one
piece or in up to 512 fragments; smaller blocks are shown without goals. CPU time is that of all the process's threads,
so it includes Python's share of a copy's cost.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from msgspec import Struct

from benchmarks.gpu import part
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from services.worker.config import CopyPath
from services.worker.contracts.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.lane import DEPTH
from shared.pool.map import ArenaMap
from tests.worker.transfer.layer_major import layer_major

if TYPE_CHECKING:
    from services.worker.transfer.cuda_copier import CudaCopier, InFlight
    from services.worker.transfer.device_memory import DeviceMemory

GIB = 1 << 30
PIECE_BYTES = 2 << 20
FRAGMENTS = {  # how many, bytes of each
    "2 MiB x 1": (1, 2 << 20),
    "128 KiB x 16": (16, 128 << 10),
    "32 KiB x 64": (64, 32 << 10),
    "4 KiB x 512": (512, 4 << 10),
    "256 KiB x 1": (1, 256 << 10),
    "4 KiB x 64": (64, 4 << 10),
}
BATCHES = (8, 64, 512)
ONE_WAY = ("save", "load")
DEVICE_BYTES = 2 * GIB
TRIES = 5
MOST_ALONE = 20


class CopyRow(Struct, frozen=True):
    """The result of one way to copy."""

    fragments: str
    blocks: int
    """The blocks in a batch."""
    how: str
    direction: str
    gb_per_s: float
    share: float
    """The rate as a share of the yardstick's in this direction."""
    cpu_ms_per_gb: float
    bytes: int
    """The size of a block."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("copies", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the pool")
    parser.add_argument("--path", choices=get_args(CopyPath), default="auto", help="the way that blocks take")


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure all shapes of blocks."""
    from services.worker.transfer.device_memory import DeviceMemory

    memory = DeviceMemory(0, reserve_bytes=256 << 20)
    rows: list[CopyRow] = []
    chosen: dict[str, Any] = {}
    with pool(flags.memory, (3 if flags.quick else 4) * GIB) as (path, geometry):
        with arena(path, geometry, PIECE_BYTES) as slots:
            rates = _yardsticks(slots)
        for name, (fragments, fragment_bytes) in FRAGMENTS.items():
            with arena(path, geometry, fragments * fragment_bytes) as slots:
                rows += _shape(name, slots, memory, rates, chosen, flags)
    return part.PartReport(_figures(rows, rates), rows, {"gb_per_s": rates, "chosen": chosen})


def _figures(rows: Sequence[CopyRow], rates: Mapping[str, float]) -> dict[str, float]:
    """Return the worst value for each goal."""

    def worst(how: str, batches: Sequence[int], directions: Sequence[str]) -> float:
        large = [row for row in rows if row.bytes == PIECE_BYTES and row.how == how]
        return min(row.share for row in large if row.blocks in batches and row.direction in directions)

    return {
        "64 and 512 blocks of 2 MiB, in a row, at worst": worst("in a row", BATCHES[1:], ONE_WAY),
        "64 and 512 blocks of 2 MiB, one batch copied, at worst": worst("copied", BATCHES[1:], ONE_WAY),
        "64 and 512 blocks of 2 MiB, one batch asked for and told, at worst": worst("told", BATCHES[1:], ONE_WAY),
        "8 blocks of 2 MiB, in a row, at worst": worst("in a row", BATCHES[:1], ONE_WAY),
        "8 blocks of 2 MiB, one batch copied, at worst": worst("copied", BATCHES[:1], ONE_WAY),
        "8 blocks of 2 MiB, one batch asked for and told, at worst": worst("told", BATCHES[:1], ONE_WAY),
        "both directions at once, at worst": worst("in a row", BATCHES[1:], ("both",)),
        "the same, of pieces of 2 MiB copied bare": worst("in a row", BATCHES[1:], ("both",))
        * rates["both"]
        / rates["both, bare pieces"],
    }


# --- yardsticks


def _yardsticks(slots: ArenaMap) -> dict[str, float]:
    """Measure plain copies of pinned memory, in GB/s: 1 GiB each way, two at once, and bare pieces."""
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda import new_stream, register, sleeping_event, unregister

    size_bytes = 2 * GIB
    host = np.frombuffer(slots.bytes, np.uint8)[:size_bytes].ctypes.data
    register(host, size_bytes)
    blocks = cupy.empty(size_bytes, cupy.uint8)
    device = blocks.data.ptr
    to_host, to_device = runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice
    saves, loads = new_stream(), new_stream()
    draw = np.random.default_rng(2)
    places = [draw.permutation(GIB // PIECE_BYTES).tolist() for _ in range(4)]

    def save() -> None:
        runtime.memcpyAsync(host, device, GIB, to_host, saves.ptr)

    def load() -> None:
        runtime.memcpyAsync(device + GIB, host + GIB, GIB, to_device, loads.ptr)

    def both() -> None:
        save()
        load()

    def pieces() -> None:
        for to, source, onto, origin in zip(*places, strict=True):
            size = PIECE_BYTES
            runtime.memcpyAsync(host + to * size, device + source * size, size, to_host, saves.ptr)
            runtime.memcpyAsync(device + GIB + onto * size, host + GIB + origin * size, size, to_device, loads.ptr)

    def rate(work: Callable[[], None], moved_bytes: int) -> float:
        best_s = inf
        for _ in range(TRIES):
            begun_s = time.perf_counter()
            work()
            for on in (saves, loads):
                done = sleeping_event()
                done.record(on)
                done.synchronize()
            best_s = min(best_s, time.perf_counter() - begun_s)
        return moved_bytes / 1e9 / best_s

    rates = {
        "save": rate(save, GIB),
        "load": rate(load, GIB),
        "both": rate(both, 2 * GIB),
        "both, bare pieces": rate(pieces, 2 * GIB),
    }
    unregister(host)
    return rates


# --- what an engine has


def _shape(
    name: str,
    slots: ArenaMap,
    memory: DeviceMemory,
    rates: Mapping[str, float],
    chosen: dict[str, Any],
    flags: argparse.Namespace,
) -> list[CopyRow]:
    """Measure all rows of one shape of blocks; their paths are added to `chosen`."""
    import cupy  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda_copier import CudaCopier
    from services.worker.transfer.mover import TransferMover

    fragments, fragment_bytes = FRAGMENTS[name]
    device_slots = DEVICE_BYTES // (fragments * fragment_bytes)
    blocks = cupy.arange(DEVICE_BYTES // 8, dtype=cupy.uint64)
    shape = layer_major(blocks.data.ptr, fragments, fragment_bytes, device_slots)
    copier = CudaCopier(shape, memory, time.perf_counter, path=flags.path)
    mover = TransferMover(copier, time.perf_counter)
    mover.attach(slots)
    asked = EndedBatch(mover)
    copies = scattered(slots, range(device_slots))
    asked.move(copies, (), len(copies))  # pins what is not pinned yet
    asked.paths.clear()
    half, moved = len(copies) // 2, (1 if flags.quick else 4) * GIB // shape.block_bytes
    saves, loads = ([each[index % half] for index in range(moved)] for each in (copies[:half], copies[half:]))
    ways: dict[str, tuple[list[Copy], list[Copy]]] = {"save": (saves, []), "load": ([], loads), "both": (saves, loads)}
    rows: list[CopyRow] = []
    for batch in BATCHES:
        for direction, (save, load) in ways.items():
            took = _used(lambda: asked.move(save, load, batch))  # noqa: B023
            moved_bytes = (len(save) + len(load)) * shape.block_bytes
            rows.append(_row(name, batch, "in a row", direction, moved_bytes, took, rates, shape))
        for direction in ONE_WAY:
            save, load = ways[direction]
            firsts = range(0, min(moved - batch + 1, MOST_ALONE * batch), batch)
            ones = [(save[first : first + batch], load[first : first + batch]) for first in firsts]
            for how, one in (("copied", partial(_copied, copier)), ("told", partial(asked.move, batch=batch))):
                took = _middle([_used(lambda: one(*each)) for each in ones])  # noqa: B023
                rows.append(_row(name, batch, how, direction, batch * shape.block_bytes, took, rates, shape))
    chosen[name] = asked.paths
    mover.detach()
    mover.close()
    del blocks
    cupy.get_default_memory_pool().free_all_blocks()
    return rows


def _copied(copier: CudaCopier, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
    """Copy in one direction in groups, DEPTH at a time, as a mover's lane does."""
    copies = saves or loads
    under_way: deque[InFlight] = deque()
    for first in range(0, len(copies), copier.group_blocks):
        if len(under_way) == DEPTH:
            under_way.popleft().wait()
        under_way.append(copier.begin(copies[first : first + copier.group_blocks], loads=bool(loads)))
    for pending in under_way:
        pending.wait()


def _middle(took: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each kind of seconds."""
    return median(seconds for seconds, _ in took), median(cpu_s for _, cpu_s in took)


def _used(work: Callable[[], None]) -> tuple[float, float]:
    """Run `work`; return the seconds of the clock and of CPU."""
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - begun_s, time.process_time() - cpu_s


def _row(
    name: str,
    batch: int,
    how: str,
    direction: str,
    moved_bytes: int,
    took: tuple[float, float],
    rates: Mapping[str, float],
    shape: BlockShape,
) -> CopyRow:
    rate = moved_bytes / 1e9 / took[0]
    cpu_ms = took[1] * 1e3 / (moved_bytes / 1e9)
    return CopyRow(name, batch, how, direction, rate, rate / rates[direction], cpu_ms, shape.block_bytes)


if __name__ == "__main__":
    sys.exit(main())
