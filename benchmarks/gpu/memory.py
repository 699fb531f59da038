"""What does an allocation from the pool of device memory cost, and how many does a decode step make?

    python -m benchmarks.gpu.memory [--quick] [--json]

`pair`: allocate and free through DeviceMemory on one stream, of several sizes, the best of several runs of thousands;
`driver` is the same two calls of CUDA's without DeviceMemory around them. `steps` counts DeviceMemory's allocations
while a batch of 32 decodes for 200 steps, by graphs and without, each step one position further. `arrays`: a CuPy
array of 64 KiB made and dropped, by DeviceMemory's allocator, by CuPy's own over the driver's pool, and by functions
for CuPy to call (`cupy.cuda.PythonFunctionAllocator`, which the collector makes unsafe); interleaved, the best of
several runs.

`sleep` puts an engine of the 8B shape to sleep at level 1 and wakes it, twice after a first time; the times are the
worst.

What could mislead: the pool has room, and one thread allocates, as in an engine; an allocation that must go to the
driver costs a hundred times as much, which is what the reserve is for. CuPy's arrays come from the same pool in an
engine, so they are counted too; what CUDA itself takes for a graph or a kernel is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from benchmarks.gpu import llama, part
from benchmarks.gpu.model import LLAMA_8B
from services.worker.config import CudaConfig
from services.worker.native.cuda.capacity import CudaSizes

SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
RESERVE_BYTES = 1 << 30
BATCH = 32
STEPS = 200
WARM = 3
"""Steps before the counted ones."""
RUNS = 5


class StepPair(Struct, frozen=True):
    """The microseconds of one allocation and its free."""

    size_bytes: int
    pair_us: float
    driver_us: float


class Steps(Struct, frozen=True):
    """The allocations of some steps."""

    steps: str
    allocations: int


class ArrayCost(Struct, frozen=True):
    """The microseconds to make an array and drop it."""

    allocator: str
    array_us: float


class Sleep(Struct, frozen=True):
    """A sleep of level 1."""

    sleep: str
    freed_gb: float
    """What the device has more while the engine sleeps."""
    sleep_s: float
    wake_s: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("memory", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure allocations by themselves, then those of steps."""
    pairs = _pairs(2_000 if flags.quick else 20_000)
    arrays = _arrays(2_000 if flags.quick else 20_000)
    steps = _steps()
    sleep = _sleep(quick=flags.quick)
    figures = {
        "allocate and free, slowest size": max(row.pair_us for row in pairs),
        "allocations in 200 decode steps": float(max(row.allocations for row in steps)),
        "8B shape, sleep of level 1: memory given back": sleep.freed_gb,
        "8B shape, sleep of level 1, with 2 GB of KV": sleep.sleep_s,
        "8B shape, wake from it, with its graphs": sleep.wake_s,
    }
    return part.PartReport(figures, [*pairs, *arrays, *steps, sleep])


def _pairs(times: int) -> list[StepPair]:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=RESERVE_BYTES), new_stream()

    def ours(size_bytes: int) -> Callable[[], None]:
        return lambda: memory.free(memory.allocate(size_bytes, on))

    def driver(size_bytes: int) -> Callable[[], None]:
        return lambda: runtime.freeAsync(runtime.mallocAsync(size_bytes, on.ptr), on.ptr)

    def best_us(pair: Callable[[], None]) -> float:
        took: list[float] = []
        for _ in range(RUNS):
            begun_s = time.perf_counter()
            for _ in range(times):
                pair()
            took.append((time.perf_counter() - begun_s) / times * 1e6)
            on.synchronize()
        return min(took)

    # CUDA's own pool keeps what is freed only while something is, so that it, too, need not go to the device.
    held = [runtime.mallocAsync(RESERVE_BYTES, on.ptr)]
    rows = [StepPair(size, best_us(ours(size)), best_us(driver(size))) for size in SIZES_BYTES]
    for address in held:
        runtime.freeAsync(address, on.ptr)
    on.synchronize()
    memory.close()
    return rows


def _arrays(times: int) -> list[ArrayCost]:
    import cupy  # pyright: ignore[reportMissingImports]

    from services.worker.transfer.device_memory import DeviceMemory

    memory = DeviceMemory(0, reserve_bytes=RESERVE_BYTES)
    on = cupy.cuda.Stream(non_blocking=True)
    by_functions = cupy.cuda.PythonFunctionAllocator(
        lambda size_bytes, _device: memory.allocate(size_bytes, cupy.cuda.get_current_stream()),
        lambda address, _device: memory.free(address),
    )
    allocators = {
        "DeviceMemory": memory.allocator(),
        "CuPy's MemoryAsyncPool": cupy.cuda.MemoryAsyncPool().malloc,
        "functions": by_functions.malloc,
    }
    best_us = dict.fromkeys(allocators, float("inf"))
    with on:
        for _ in range(RUNS):
            for name, allocator in allocators.items():
                with cupy.cuda.using_allocator(allocator):
                    held = cupy.empty(64 << 10, cupy.uint8)  # CUDA's own pool keeps its memory only while some is used
                    begun_s = time.perf_counter()
                    for _ in range(times):
                        cupy.empty(64 << 10, cupy.uint8)
                    best_us[name] = min(best_us[name], (time.perf_counter() - begun_s) / times * 1e6)
                    del held
                on.synchronize()
    memory.close()
    return [ArrayCost(name, us) for name, us in best_us.items()]


def _steps() -> list[Steps]:
    """Count the allocations of steps, on a model of few layers: their number changes no allocation."""
    from services.worker.native.cuda.runner import CudaRunner

    config = msgspec.structs.replace(LLAMA_8B, layers=4)
    memory = llama.device_memory()
    weights = llama.random_weights(config)
    settings = CudaConfig(graph_upper_bound=BATCH)
    sizes = CudaSizes(capacity_blocks=llama.blocks(BATCH), max_running=BATCH, max_rows=BATCH)
    runner = CudaRunner(config, weights, memory, settings, sizes)
    rows: list[Steps] = []
    for how in ("graph", "eager"):
        runner.use_graphs = how == "graph"
        works = llama.decoding(BATCH, BATCH, end=llama.CONTEXT - STEPS - WARM)
        allocated: list[int] = []
        for _ in range(WARM + STEPS):
            allocated.append(memory.statistics().allocated)
            llama.go_on(works, runner.step(works))
        rows.append(Steps(how, memory.statistics().allocated - allocated[WARM]))
    runner.close()
    return rows


def _sleep(*, quick: bool) -> Sleep:
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.runner import CudaRunner

    config = llama.shape(quick=quick)
    memory = llama.device_memory()
    capacity_blocks = (2 << 30) // llama.block_bytes(config)
    weights = llama.random_weights(config)
    settings = CudaConfig(graph_upper_bound=BATCH)
    sizes = CudaSizes(capacity_blocks=capacity_blocks, max_running=BATCH)
    runner = CudaRunner(config, weights, memory, settings, sizes)
    del weights
    freed_gb, sleep_s, wake_s = 0.0, 0.0, 0.0
    for number in range(3):
        awake_bytes, begun_s = runtime.memGetInfo()[0], time.perf_counter()
        failed = runner.operate("sleep", "", "", 1)
        slept_s = time.perf_counter()
        freed_gb = (runtime.memGetInfo()[0] - awake_bytes) / 1e9
        wakes_s = time.perf_counter()
        failed += runner.operate("wake", "", "", 1)
        woke_s = time.perf_counter()
        assert not failed, failed
        if number:
            sleep_s, wake_s = max(sleep_s, slept_s - begun_s), max(wake_s, woke_s - wakes_s)
    runner.close()
    return Sleep("level 1", freed_gb, sleep_s, wake_s)


if __name__ == "__main__":
    sys.exit(main())
