"""What do two ranks cost and gain: steps, sums between GPUs, and blocks that both copy?

    python -m benchmarks.gpu.parallel [--ranks N] [--shape 8b|70b] [--layers N] [--memory TMPFS] [--quick] [--json]

`steps`: whole steps of the Runner by a host clock, drawing and waiting included, the median of steps one after another:
decode at a context of 2,048 and a prompt of 2,048, of one rank and then of --ranks. Ranks have a GPU each, or share one
if there are fewer: then each waits for the other's time slice, and the times say nothing of two GPUs.

`sums`: a captured graph of sums of rows of 4,096 and 8,192 float32 numbers, two ranks as streams of one process on one
GPU. That is the kernel's own time, without a link.

`blocks`: 256 blocks of the model saved to a pool in a tmpfs and loaded again, in batches of 64 asked for at once, of
one rank and of --ranks, by each path. Bytes are those of whole blocks.

What could mislead: the model is written into the tmpfs first (70b at 16 layers has 30 GB), and one rank must fit on one
GPU. One rank and several are measured one after the other, not in turn, because both hold most of the memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.gpu import part
from benchmarks.gpu.model import LLAMA_8B, add_tokenizer, smol_tokenizer, write_model
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from services.worker.config import CopyPath, CudaConfig, WorkerConfig
from services.worker.contracts.runner import AttachedPool, Work
from shared.messages.generate import Sampling
from shared.pool.lock import OWNERS, hold_owner

if TYPE_CHECKING:
    from services.worker.native.cuda.runner import CudaRunner

SHAPES = {
    "8b": LLAMA_8B,
    "70b": replace(LLAMA_8B, layers=16, hidden=8192, intermediate=28672, heads=64),
}
"""Shapes by name; the second has a fifth of the 70B's layers, so that one rank fits on one GPU."""
CONTEXT = 2048
BATCHES = (1, 32)
STEPS = 30
BLOCKS, BATCH = 256, 64
SUM_ROWS = (1, 8, 32, 128)
SUM_WIDTHS = (4096, 8192)
SUMS = 200
"""Sums of a graph."""
PATHS: tuple[CopyPath, ...] = ("rows", "batch")


class RankStepRow(Struct, frozen=True):
    """The time of one kind of step."""

    ranks: int
    gpus: int
    what: str
    step_ms: float


class SumRow(Struct, frozen=True):
    """The time of one sum, in a graph."""

    rows: int
    width: int
    sum_us: float


class RankCopyRow(Struct, frozen=True):
    """The rate of blocks."""

    ranks: int
    path: str
    direction: str
    gb_per_s: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("parallel", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="layers of the model (those of the shape; with --quick 8)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the model and the pool")
    add_tokenizer(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure sums, then one rank and several."""
    rows: list[Any] = list(_sums())
    shape = SHAPES[flags.shape]
    shape = replace(shape, layers=flags.layers or (8 if flags.quick else shape.layers))
    copies: dict[tuple[int, str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="parallel-", dir=flags.memory) as directory:
        model = write_model(Path(directory) / "model", shape, flags.tokenizer or smol_tokenizer())
        for ranks in (1, flags.ranks):
            for number, path in enumerate(PATHS if ranks > 1 else ("auto",)):
                with _runner(model, ranks, path) as runner:
                    if number == 0:
                        rows += _steps(runner, ranks)
                    for row in _blocks(runner, ranks, path, flags.memory):
                        rows.append(row)
                        copies[ranks, path, row.direction] = row.gb_per_s
    figures = {
        f"two ranks, {direction} of a block, of one rank's": max(
            copies[flags.ranks, path, direction] / copies[1, "auto", direction] for path in PATHS
        )
        for direction in ("save", "load")
    }
    return part.PartReport(figures, rows)


@contextmanager
def _runner(model: Path, ranks: int, path: CopyPath) -> Iterator[CudaRunner]:
    import cupy  # pyright: ignore[reportMissingImports]

    from services.worker.native.cuda.load import load_cuda

    config = WorkerConfig(
        model=str(model),
        cache=str(model.parent / "cache"),
        device="cuda",
        cuda=CudaConfig(ranks_share_gpus=True, copy_path=path, graph_upper_bound=max(BATCHES)),
        capacity_blocks=2 * max(BATCHES) * (CONTEXT // 16 + 1),
        max_running=max(BATCHES),
        lora_bytes=0,
        tensor_parallel=ranks,
    )
    try:
        runner = load_cuda(config, lambda _loading: None)
        try:
            yield runner
        finally:
            runner.close()
        runner._memory.trim()
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


def _steps(runner: CudaRunner, ranks: int) -> Iterator[RankStepRow]:
    draw = np.random.default_rng(0)
    greedy = Sampling(max_tokens=1 << 20, temperature=0.0)
    blocks = CONTEXT // runner.facts.block_size + 1
    for batch in BATCHES:
        works = []
        for number in range(batch):
            history = draw.integers(0, runner.facts.vocab_size, CONTEXT).tolist()
            slots = list(range(number * blocks, (number + 1) * blocks))
            works.append(Work(number, history, CONTEXT - 1, CONTEXT, slots, greedy, CONTEXT))
        yield RankStepRow(ranks, _gpus(runner), f"decode, batch {batch}", _median_ms(runner, works))
    prompt = replace(works[0], start=0)
    yield RankStepRow(ranks, _gpus(runner), f"prompt of {CONTEXT:,}", _median_ms(runner, [prompt]))


def _gpus(runner: CudaRunner) -> int:
    return len(runner.facts.gpus)


def _median_ms(runner: CudaRunner, works: Sequence[Work]) -> float:
    took = []
    for number in range(STEPS + 3):
        begun_s = time.perf_counter()
        runner.step(works)
        if number >= 3:
            took.append(time.perf_counter() - begun_s)
    return 1e3 * median(took)


def _blocks(runner: CudaRunner, ranks: int, path: str, memory: Path) -> Iterator[RankCopyRow]:
    """Measure saves, then loads of the same blocks."""
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
            ended, copies = EndedBatch(mover), scattered(slots, range(BLOCKS))[:BLOCKS]
            ended.move(copies, (), BATCH)  # pins the slots
            for direction in ("save", "load"):
                rates = []
                for _ in range(5):
                    begun_s = time.perf_counter()
                    ended.move(copies if direction == "save" else (), copies if direction == "load" else (), BATCH)
                    rates.append(len(copies) * block_bytes / (time.perf_counter() - begun_s) / 1e9)
                yield RankCopyRow(ranks, path, direction, median(rates))
            mover.detach()
        finally:
            mover.close()
            owner.close(delete=True)


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
