"""How fast do blocks go between a GPU and a kvbm's pool, against one large pinned copy over the same link?

    python -m benchmarks.gpu_copies [--json] [--quick]

the paths: groups of 32 MiB of blocks, scattered on both sides, one after another without a pause, each path by itself;
`mover`: what an engine gets, in batches of 64 blocks, with the path that calibration chose, loads and saves apart and
both at once. `pinned` is one copy of 1 GiB of the same pool, by a plain cudaMemcpyAsync.

What could mislead: the pool lies in /dev/shm and all of it is touched and pinned before anything is timed; nothing
computes beside the copies; the batches are asked for all at once, so that the lanes never run dry. The CPU time is that
of all the process's threads, so Python's share of what a copy costs an engine is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import msgspec
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from benchmarks.report import Goal, report
from services.worker.copies import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import register, sleeping_event, stream, unregister
from services.worker.transfer.cuda_copier import CudaCopier
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.mover import TransferMover
from services.worker.transfer.paths import Host
from shared.pool_format import Geometry
from shared.pool_map import PoolMap, touch

GIB = 1 << 30
SHAPES = {  # fragments, bytes of each
    "super-blocks of 2 MiB": (1, 2 << 20),
    "super-blocks of 256 KiB": (1, 256 << 10),
    "128 KiB x 128": (128, 128 << 10),
    "32 KiB x 64": (64, 32 << 10),
    "4 KiB x 64": (64, 4 << 10),
}
DEVICE_BYTES = 2 * GIB
GOAL_OF_PINNED = 0.95


class Row(Struct, frozen=True):
    shape: str
    what: str
    direction: str
    gb_per_s: float
    of_pinned: float
    cpu_s_per_gb: float


class Beside(Struct, frozen=True):
    """What computes and reads memory without a pause takes `times` as long while blocks are copied."""

    shape: str
    direction: str
    times: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    pool_bytes = (2 if arguments.quick else 4) * GIB
    moved_bytes = (2 if arguments.quick else 6) * GIB
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "pool"
        geometry = _pool(path, pool_bytes)
        cupy.zeros(1)  # CUDA has started
        rows = [_pin(path, geometry, chunk_bytes) for chunk_bytes in (64 << 20, 256 << 20, GIB)]
        pinned = _pinned(path, geometry)
        rows += [Row("", "pinned", direction, rate, 1.0, 0.0) for direction, rate in pinned.items()]
        chosen: dict[str, Any] = {}
        beside: list[Beside] = []
        for name in SHAPES:
            rows += _shape(name, path, geometry, pinned, moved_bytes, chosen, beside)
    goals = [
        Goal(f"{row.shape}, {row.what}, {row.direction}", row.of_pinned, "of pinned", GOAL_OF_PINNED,
             row.of_pinned >= GOAL_OF_PINNED)
        for row in rows if row.what == "mover" and row.direction in pinned
    ]  # fmt: skip
    for row in rows:
        print(f"{row.shape:24} {row.what:12} {row.direction:6} {row.gb_per_s:7.2f} GB/s {row.of_pinned:6.3f}"
              f" {row.cpu_s_per_gb * 1e3:7.2f} CPU ms/GB")  # fmt: skip
    for ratio in beside:
        print(f"{ratio.shape:24} beside       {ratio.direction:6} {ratio.times:.3f} times")
    for name, steps in chosen.items():
        print(name, steps)
    if arguments.json:
        device = runtime.getDeviceProperties(0)["name"].decode()
        told = report(
            "gpu_copies", [word for word in ("--json", "--quick") if getattr(arguments, word[2:])], goals, rows
        )
        print(json.dumps(msgspec.to_builtins(told | {"device": device, "beside": beside, "chosen": chosen})))


def _pool(path: Path, size_bytes: int) -> Geometry:
    """Made and touched."""
    geometry = Geometry.of(size_bytes)
    path.touch(0o600)
    os.truncate(path, size_bytes)
    with path.open("r+b") as opened:
        opened.write(geometry.header())
    return geometry


def _pin(path: Path, geometry: Geometry, chunk_bytes: int) -> Row:
    """Registering a touched pool, chunk by chunk; GB/s of that."""
    pool = PoolMap(path)
    slots = pool.arena(geometry.arena(0, 1, 1 << 20))
    touch(slots.bytes)
    at = np.frombuffer(slots.bytes, np.uint8).ctypes.data
    size_bytes = slots.arena.size_bytes // chunk_bytes * chunk_bytes
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    for offset in range(0, size_bytes, chunk_bytes):
        register(at + offset, chunk_bytes)
    took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    for offset in range(0, size_bytes, chunk_bytes):
        unregister(at + offset)
    slots.close()
    pool.close()
    return Row("", f"pin {chunk_bytes >> 20} MiB", "", size_bytes / took_s / 1e9, 0.0, cpu_s / size_bytes * 1e9)


def _pinned(path: Path, geometry: Geometry) -> dict[str, float]:
    """GB/s of 1 GiB in one copy."""
    pool = PoolMap(path)
    slots = pool.arena(geometry.arena(0, 1, 1 << 20))
    host = np.frombuffer(slots.bytes, np.uint8)[:GIB].ctypes.data
    register(host, GIB)
    device, on = cupy.empty(GIB, cupy.uint8), stream()
    rates = {}
    for direction, kind in (("save", runtime.memcpyDeviceToHost), ("load", runtime.memcpyHostToDevice)):
        to, source = (host, device.data.ptr) if direction == "save" else (device.data.ptr, host)
        rates[direction] = GIB / 1e9 / min(_timed(lambda: runtime.memcpyAsync(to, source, GIB, kind, on.ptr), on)  # noqa: B023
                                           for _ in range(5))  # fmt: skip
    unregister(host)
    slots.close()
    pool.close()
    return rates


def _shape(
    name: str,
    path: Path,
    geometry: Geometry,
    pinned: dict[str, float],
    moved_bytes: int,
    chosen: dict[str, Any],
    beside: list[Beside],
) -> list[Row]:
    fragments, fragment_bytes = SHAPES[name]
    device_slots = DEVICE_BYTES // (fragments * fragment_bytes)
    blocks = cupy.random.randint(0, 256, DEVICE_BYTES, dtype=cupy.uint8)
    memory = DeviceMemory(0, reserve_bytes=256 << 20)
    shape = BlockShape.layer_major(blocks.data.ptr, fragments, fragment_bytes, device_slots)
    begun_s = time.perf_counter()
    copier = CudaCopier(shape, memory, time.perf_counter)
    calibration_s = time.perf_counter() - begun_s
    chosen[name] = {
        "calibration_s": round(calibration_s, 3),
        **{
            f"{'load' if loads else 'save'} {count}": copier.choice.path(count, loads=loads)
            for loads in (False, True)
            for count in (1, 8, group_blocks(shape.block_bytes))
        },
        "us": {
            f"{'load' if row.loads else 'save'} {row.blocks} {row.path}": round(row.took_s * 1e6, 1)
            for row in copier.choice.measured
        },
    }
    pool = PoolMap(path)
    slots = pool.arena(geometry.arena(0, 1, shape.block_bytes))
    mover = TransferMover(copier, time.perf_counter)
    mover.attach(slots)
    while copier.prepare():
        pass
    draw = np.random.default_rng(1)
    count = min(device_slots, slots.arena.slots)
    copies = [
        Copy(int(there), int(here), slots.generation(int(there)))
        for there, here in zip(
            draw.permutation(slots.arena.slots)[:count], draw.permutation(device_slots)[:count], strict=True
        )
    ]
    many = [copies[index % count] for index in range(moved_bytes // shape.block_bytes)]
    host = Host(np.frombuffer(slots.bytes, np.uint8).ctypes.data, slots.arena.slot_bytes)
    group = group_blocks(shape.block_bytes)
    rows = []
    for direction in ("save", "load"):
        loads = direction == "load"
        side = copier.directions[loads]
        for what, route in side.paths.items():

            def issue() -> None:
                last = side.stream  # noqa: B023
                for first in range(0, len(many) // 2, group):
                    last = route.issue(many[first : first + group], host, loads=loads, on=side.stream)  # noqa: B023
                side.stream.wait_event(last.record())  # noqa: B023

            rows.append(_row(name, what, direction, len(many) // 2 * shape.block_bytes, pinned, issue, side.stream))
        rows.append(_row(name, "mover", direction, len(many) * shape.block_bytes, pinned,
                         lambda: _move(mover, many, direction), None))  # noqa: B023  # fmt: skip
    rows.append(_row(name, "mover", "both", 2 * len(many) * shape.block_bytes, pinned,
                     lambda: _move(mover, many, "both"), None))  # fmt: skip
    beside += _beside(name, mover, many)
    mover.detach()
    slots.close()
    pool.close()
    mover.close()
    memory.close()
    return rows


def _beside(name: str, mover: TransferMover, copies: Sequence[Copy]) -> list[Beside]:
    """A graph of 40 kernels that each read and write 512 MiB, 10 ms, alone and while the mover copies."""
    on = stream()
    numbers = cupy.ones(1 << 27, cupy.float32)
    with on:
        cupy.add(numbers, 1, out=numbers)
        on.begin_capture()
        for _ in range(40):
            cupy.add(numbers, 1, out=numbers)
        graph = on.end_capture()
        on.synchronize()

    def took_ms(direction: str) -> float:
        batches = _ask(mover, copies, direction)
        begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
        begun.record(on)
        graph.launch(on)
        ended.record(on)
        ended.synchronize()
        _await(mover, batches)
        return float(cupy.cuda.get_elapsed_time(begun, ended))

    took = {direction: median(took_ms(direction) for _ in range(5)) for direction in ("", "save", "load", "both")}
    return [Beside(name, direction, took[direction] / took[""]) for direction in ("save", "load", "both")]


def _move(mover: TransferMover, copies: Sequence[Copy], direction: str) -> None:
    _await(mover, _ask(mover, copies, direction))


def _ask(mover: TransferMover, copies: Sequence[Copy], direction: str) -> int:
    """Batches of 64; how many."""
    batches = 0
    for first in range(0, len(copies), 64):
        if direction in ("save", "both"):
            mover.save(batches, copies[first : first + 64], float("inf"))
            batches += 1
        if direction in ("load", "both"):
            mover.load(batches, copies[first : first + 64])
            batches += 1
    return batches


def _await(mover: TransferMover, batches: int) -> None:
    while batches:
        select.select([mover], [], [])
        told = mover.ended()
        assert all(all(copied.good) for copied in told), told
        batches -= len(told)


def _row(
    name: str, what: str, direction: str, size_bytes: int, pinned: dict[str, float], work: Callable[[], None], on: Any
) -> Row:
    cpu_s = time.process_time()
    took_s = _timed(work, on)
    cpu_s = time.process_time() - cpu_s
    rate = size_bytes / 1e9 / took_s
    return Row(
        name, what, direction, rate, rate / pinned.get(direction, sum(pinned.values())), cpu_s / size_bytes * 1e9
    )


def _timed(work: Callable[[], None], on: Any) -> float:
    begun_s = time.perf_counter()
    work()
    if on is not None:
        done = sleeping_event()
        done.record(on)
        done.synchronize()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main()
