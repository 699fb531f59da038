"""What do ranks cost and gain: steps, sums between GPUs, and blocks that all of them copy?

    python -m benchmarks.gpu.parallel [--shape 8b|70b] [--ranks 1 2] [--layers N …] [--batches 1 32 128] [--no-sums]
                                      [--memory TMPFS] [--model DIRECTORY] [--quick] [--json]

`steps`: decode at a context of 2,048 and a prompt of 2,048, for each number of ranks. Ranks have a GPU each, or share
one if there are fewer: then each waits for the other's time slice, and the times say nothing of several GPUs. `device`
is the time between events on the stream of rank 0, as in `benchmarks.gpu.decode`. `step` is the whole step of the
Runner by a host clock, which an engine waits for in the same way before it begins the next one. A share is the time in
which the ranks' GPUs can read the weights, keys and values of the step, each at the rate of `benchmarks.gpu.decode`,
divided by `device`.

The shape 70b has 80 layers and 141 GB, which no tmpfs gets in seconds. So one model is written with the most of
--layers, and served with each number of these. A row that says `line` has the whole shape's times, from the line
through the fewest layers and the most. `--layers 80` measures all of them, if the tmpfs has 144 GB.

`blocks`: 256 blocks of the model saved to a pool in a tmpfs and loaded again, in batches of 64 asked for at once. Bytes
are those of whole blocks. The figure is the rate of several ranks divided by that of one and by their GPUs.
`links` is their yardstick: plain copies of pinned memory over the link of each GPU alone, and over all links at once.

`sums`: a captured graph of sums of rows of 4,096 and 8,192 float32 numbers, two ranks as streams of one process on one
GPU. That is the kernel's own time, without a link.

What could mislead: both shapes have SmolLM2's vocabulary; Llama's own would add 1.3 GB to a step of 70b. One rank and
several are measured one after the other, not in turn, because both hold most of the memory; the spread is that of
steps one after another. Keys and values are random numbers, which are loaded from the pool before the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.gpu import llama, part
from benchmarks.gpu.decode import kv_bytes, reading_rate, weight_bytes
from benchmarks.gpu.llama import CONTEXT, GREEDY
from benchmarks.gpu.model import LLAMA_8B, SMOL_VOCABULARY, add_tokenizer, random_tile, smol_tokenizer, write_model
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from services.worker.config import CudaConfig, WorkerConfig
from services.worker.contracts.mover import Copy
from services.worker.contracts.runner import AttachedPool, Work
from shared.pool.lock import OWNERS, hold_owner
from shared.pool.map import ArenaMap

if TYPE_CHECKING:
    from services.worker.native.config import ModelConfig
    from services.worker.native.cuda.runner import CudaRunner

SHAPES = {
    "8b": LLAMA_8B,
    "70b": replace(LLAMA_8B, layers=80, hidden=8192, intermediate=28672, heads=64),
}
LAYERS = {"8b": (32,), "70b": (8, 24)}
QUICK_LAYERS = {"8b": (8,), "70b": (2, 4)}
BATCHES = (1, 32, 128)
STEPS, FEW_STEPS, WARM_STEPS = 50, 10, 3
BLOCKS, BATCH = 256, 64
FILL_BLOCKS = 1024
"""Blocks that are asked for at once while all blocks of the GPUs are filled."""
COPIES = 5
LINK_BYTES = 1 << 30
"""Bytes of a plain copy."""
SUM_ROWS = (1, 8, 32, 128)
SUM_WIDTHS = (4096, 8192)
SUMS = 200
"""Sums of a graph."""


class RankStepRow(Struct, frozen=True):
    """The times of one kind of step."""

    ranks: int
    gpus: int
    layers: int
    what: str
    how: str
    """The word `measured`, or `line` if the times follow from those of fewer layers."""
    step_ms: float
    """The median time of the Runner's whole step by a host clock."""
    spread_ms: tuple[float, float]
    """The quartiles of that time."""
    device_ms: float
    """The median time between CUDA events."""
    floor_ms: float
    """The least time that the rate of the GPUs' memory allows; 0 for a prompt."""
    share: float
    """The quotient floor ÷ device."""


class SumRow(Struct, frozen=True):
    """The time of one sum, in a graph."""

    rows: int
    width: int
    sum_us: float


class LinkRow(Struct, frozen=True):
    """The rate of plain copies."""

    gpus: int
    direction: str
    gb_per_s: float
    """The bytes of all GPUs together."""


class RankCopyRow(Struct, frozen=True):
    """The rate of blocks."""

    ranks: int
    gpus: int
    layers: int
    direction: str
    gb_per_s: float
    spread_gb_per_s: tuple[float, float]
    """The lowest rate and the highest."""
    paths: dict[str, int]
    """Path → blocks that rank 0 copied on it."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("parallel", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, nargs="+", help="default: 32 of 8b; 8 and 24 of 70b")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--no-sums", action="store_true")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the model and the pool")
    parser.add_argument("--model", type=Path, help="a directory there with such a model; default: a new one")
    add_tokenizer(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure sums, then each number of ranks and layers. Rows are printed to stderr as they come."""
    shape = replace(SHAPES[flags.shape], vocab=SMOL_VOCABULARY)
    layers = sorted(flags.layers or (QUICK_LAYERS if flags.quick else LAYERS)[flags.shape])
    rates = _reading_rates(max(flags.ranks))
    rows = _Rows()
    rows.show(_links(len(rates)))
    if not flags.no_sums:
        rows.show(_sums())
    with tempfile.TemporaryDirectory(prefix="parallel-", dir=flags.memory) as folder:
        directory = Path(folder)
        most = replace(shape, layers=layers[-1])
        whole = flags.model or write_model(directory / "model", most, flags.tokenizer or smol_tokenizer())
        models = {count: _with_layers(whole, directory / f"layers-{count}", count) for count in layers}
        for ranks in flags.ranks:
            for count, model in models.items():
                with _runner(model, ranks, max(flags.batches)) as runner:
                    rows.show(_blocks(runner, ranks, count, flags.memory))
                    rows.show(_steps(runner, replace(shape, layers=count), ranks, flags.batches, rates))
    rows.show(_on_lines(rows.steps, shape.layers))
    return part.PartReport(_figures(flags.shape, shape.layers, rows), rows.all, {"read_tb_per_s": rates})


class _Rows:
    """The rows so far."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def show(self, rows: Iterator[Any]) -> None:
        for row in rows:
            print(row, file=sys.stderr, flush=True)
            self.all.append(row)

    @property
    def steps(self) -> list[RankStepRow]:
        return [row for row in self.all if isinstance(row, RankStepRow)]

    @property
    def copies(self) -> list[RankCopyRow]:
        return [row for row in self.all if isinstance(row, RankCopyRow)]


def _figures(shape: str, layers: int, rows: _Rows) -> dict[str, float]:
    """Return the figures of the whole shape with a GPU for each rank, and of blocks."""
    figures: dict[str, float] = {}
    whole = {(row.ranks, row.what): row for row in rows.steps if row.layers == layers and row.gpus == row.ranks}
    decodes = [f"decode, batch {batch}" for batch in BATCHES]
    for (ranks, what), row in whole.items():
        if shape == "70b" and ranks == 2 and what in decodes:
            figures[f"two GPUs, 70B shape: {what}"] = row.share
            figures[f"two GPUs, 70B shape: whole step of {what}"] = row.step_ms
    alone, two = (whole.get((ranks, "decode, batch 1")) for ranks in (1, 2))
    if shape == "8b" and alone is not None and two is not None:
        figures["two GPUs, 8B shape: decode, batch 1"] = alone.step_ms / two.step_ms
    alone_rates = {(row.layers, row.direction): row.gb_per_s for row in rows.copies if row.ranks == 1}
    for copied in rows.copies:
        alone_rate = alone_rates.get((copied.layers, copied.direction))
        if copied.ranks == 2 and alone_rate is not None:
            figure = copied.gb_per_s / alone_rate / copied.gpus
            figures[f"two ranks, {copied.direction} of a block, of one rank's"] = figure
    return figures


def _reading_rates(most: int) -> list[float]:
    """Return the TB a second at which each of up to `most` GPUs reads its memory."""
    import cupy  # pyright: ignore[reportMissingImports]

    rates = []
    for gpu in range(min(most, int(cupy.cuda.runtime.getDeviceCount()))):
        with cupy.cuda.Device(gpu):
            rates.append(reading_rate() / 1e12)
            cupy.get_default_memory_pool().free_all_blocks()
    return rates


def _links(most: int) -> Iterator[LinkRow]:
    """Copy pinned memory from and to one GPU, then from and to all of up to `most` at once."""
    import cupy  # pyright: ignore[reportMissingImports]

    def place(gpu: int) -> tuple[Any, Any, Any]:
        with cupy.cuda.Device(gpu):
            return (
                cupy.cuda.alloc_pinned_memory(LINK_BYTES),
                cupy.cuda.alloc(LINK_BYTES),
                cupy.cuda.Stream(non_blocking=True),
            )

    places = [place(gpu) for gpu in range(most)]
    for gpus in sorted({1, most}):
        for direction in ("save", "load"):
            rates = []
            for _ in range(COPIES):
                begun_s = time.perf_counter()
                for number, (host, device, stream) in enumerate(places[:gpus]):
                    ends = (host.ptr, device.ptr) if direction == "save" else (device.ptr, host.ptr)
                    with cupy.cuda.Device(number):
                        cupy.cuda.runtime.memcpyAsync(*ends, LINK_BYTES, cupy.cuda.runtime.memcpyDefault, stream.ptr)
                for number, (_, _, stream) in enumerate(places[:gpus]):
                    with cupy.cuda.Device(number):
                        stream.synchronize()
                rates.append(gpus * LINK_BYTES / (time.perf_counter() - begun_s) / 1e9)
            yield LinkRow(gpus, direction, median(rates))
    del places
    cupy.get_default_memory_pool().free_all_blocks()


def _with_layers(model: Path, directory: Path, layers: int) -> Path:
    """Make a directory of the first layers of a model, which has the same files, and return it."""
    directory.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            os.link(file, directory / file.name)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def _runner(model: Path, ranks: int, most: int) -> Iterator[CudaRunner]:
    """Yield a runner for up to `most` sequences of CONTEXT."""
    import cupy  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.load import load_cuda

    config = WorkerConfig(
        model=str(model),
        cache=str(model.parent / "cache"),
        device="cuda",
        cuda=CudaConfig(ranks_share_gpus=True, graph_upper_bound=most),
        capacity_blocks=max(BLOCKS, most * CONTEXT // 16),
        max_running=most,
        lora_bytes=0,
        tensor_parallel=ranks,
    )
    begun_s = time.monotonic()
    try:
        runner = load_cuda(config, lambda _loading: None)
        print(f"{ranks} ranks are ready after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        try:
            yield runner
        finally:
            runner.close()
        runner._memory.trim()
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


def _steps(
    runner: CudaRunner, shape: ModelConfig, ranks: int, batches: Sequence[int], rates: Sequence[float]
) -> Iterator[RankStepRow]:
    """Measure decode steps on pages that lie scattered, then a prompt."""
    draw = np.random.default_rng(0)
    each = CONTEXT // runner.facts.block_size
    slots = draw.permutation(max(batches) * each).tolist()
    gpus = len(runner.facts.gpus)
    works = [
        Work(
            *(number, draw.integers(0, runner.facts.vocab_size, CONTEXT).tolist(), CONTEXT - 1, CONTEXT),
            *(slots[number * each : (number + 1) * each], GREEDY, CONTEXT),
        )
        for number in range(max(batches))
    ]
    ways = {f"decode, batch {batch}": works[:batch] for batch in batches}
    for what, chosen in (ways | {f"prompt of {CONTEXT:,}": [replace(works[0], start=0)]}).items():
        floor_ms = 0.0
        if what in ways:
            read_bytes = weight_bytes(shape) + len(chosen) * CONTEXT * kv_bytes(shape)
            floor_ms = read_bytes / sum(rates[:gpus]) / 1e9
        count = STEPS if what in ways and gpus == ranks else FEW_STEPS
        device_ms = median(_timed(partial(llama.device_ms, runner, chosen), count))
        step_ms = _timed(partial(llama.step_ms, runner, chosen), count)
        yield RankStepRow(
            *(ranks, gpus, shape.layers, what, "measured", median(step_ms)),
            *((step_ms[count // 4], step_ms[3 * count // 4]), device_ms, floor_ms, floor_ms / device_ms),
        )


def _timed(measured: Callable[[], float], count: int) -> list[float]:
    """Return the ascending times of `count` steps."""
    return sorted([measured() for _ in range(WARM_STEPS + count)][WARM_STEPS:])


def _on_lines(rows: Sequence[RankStepRow], layers: int) -> Iterator[RankStepRow]:
    """Yield the times of a shape of `layers` from the lines through those of fewer layers."""
    for few in rows:
        alike = [row for row in rows if (row.ranks, row.what) == (few.ranks, few.what)]
        many = alike[-1]
        if few != alike[0] or not few.layers < many.layers < layers:
            continue
        times = (layers - few.layers) / (many.layers - few.layers)
        first, last = (np.array([row.step_ms, *row.spread_ms, row.device_ms, row.floor_ms]) for row in (few, many))
        step_ms, least, most, device_ms, floor_ms = (first + times * (last - first)).tolist()
        yield RankStepRow(
            *(few.ranks, few.gpus, layers, few.what, "line", step_ms, (least, most)),
            *(device_ms, floor_ms, floor_ms / device_ms),
        )


def _blocks(runner: CudaRunner, ranks: int, layers: int, memory: Path) -> Iterator[RankCopyRow]:
    """Fill all blocks with random numbers from a pool; measure saves, then loads of the same blocks."""
    block_bytes = runner.facts.kv_layout.block_bytes
    with pool(memory, 2 * BLOCKS * block_bytes) as (file, geometry), arena(file, geometry, block_bytes) as slots:
        (file.parent / OWNERS).mkdir(mode=0o700)
        owner = hold_owner(file.parent, "w1-0", shared=True)
        about = file.stat()
        attached = AttachedPool(str(file.parent), owner.path.name, (about.st_dev, about.st_ino))
        runner.pool_place = lambda: attached
        mover = runner.mover(time.monotonic)
        try:
            mover.attach(slots)
            ended = EndedBatch(mover)
            _fill(slots, ended, runner.facts.capacity_blocks)  # it also pins the slots
            copies = scattered(slots, range(BLOCKS))
            for direction in ("save", "load"):
                rates = []
                ended.paths.clear()
                for _ in range(COPIES):
                    begun_s = time.perf_counter()
                    ended.move(copies if direction == "save" else (), copies if direction == "load" else (), BATCH)
                    rates.append(len(copies) * block_bytes / (time.perf_counter() - begun_s) / 1e9)
                yield RankCopyRow(
                    *(ranks, len(runner.facts.gpus), layers, direction, median(rates)),
                    *((min(rates), max(rates)), dict(ended.paths)),
                )
            mover.detach()
        finally:
            mover.close()
            owner.close(delete=True)


def _fill(slots: ArenaMap, ended: EndedBatch, blocks: int) -> None:
    """Write random bfloat16 numbers to the pool, and load them into all blocks."""
    tile = random_tile(1.0).view(np.uint8)
    room = np.frombuffer(slots.bytes, np.uint8)
    for first in range(0, len(room), len(tile)):
        part_of_room = room[first : first + len(tile)]
        part_of_room[:] = tile[: len(part_of_room)]
    count = slots.arena.slots
    copies = [Copy(block % count, block, slots.generation(block % count)) for block in range(blocks)]
    for first in range(0, blocks, FILL_BLOCKS):
        ended.move((), copies[first : first + FILL_BLOCKS], BATCH)


def _sums() -> Iterator[SumRow]:
    """Measure sums of two ranks on one GPU, each on a stream of its own."""
    import cupy  # pyright: ignore[reportMissingImports]

    from tests.gpu.test_exchange import adding, on_device, ranks_of, run_all

    for width in SUM_WIDTHS:
        for rows in SUM_ROWS:
            with ranks_of(2, width) as group:
                own, to = ([on_device(np.ones((rows, width), np.float32)) for _ in range(2)] for _ in range(2))
                run_all(group, adding(to, own, 1.0))
                graphs: list[Any] = []
                for number, rank in enumerate(group):
                    with rank.stream:
                        rank.stream.begin_capture()
                        adding(to, own, 1.0, SUMS)(rank, number)
                        graphs.append(rank.stream.end_capture())
                        graphs[-1].upload(rank.stream)
                took = []
                for _ in range(5):
                    cupy.cuda.Device(0).synchronize()
                    begun_s = time.perf_counter()
                    for rank, graph in zip(group, graphs, strict=True):
                        graph.launch(rank.stream)
                    for rank in group:
                        rank.stream.synchronize()
                        rank.exchange.check()
                    took.append(time.perf_counter() - begun_s)
                yield SumRow(rows, width, 1e6 * median(took) / SUMS)


if __name__ == "__main__":
    sys.exit(main())
