"""How much longer does a decode step take while blocks are copied at full speed?

    `python -m benchmarks.gpu.beside` [--memory TMPFS] [--quick] [--json]

A batch of 32 of an 8B Llama shape decodes at 2,048 positions, by graphs, which reads memory nearly all of the time;
the runner's own mover saves blocks of other pages to a pool, loads others from it, or both. Between steps the engine's
thread collects ended batches and asks for more, as in an engine, so that no copy ever waits for it. `step_ms` is a host
clock around the Runner's whole step; `device_ms` is the time between CUDA events around its computing, without the
draw. The kinds of copies take turns, ten steps of each.

What could mislead: the mover's threads hold the GIL now and then, which is part of the step's time; asking for more is
not. An engine asks for fewer copies than this most of the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from benchmarks.gpu import llama, part
from benchmarks.gpu.moving import EndedBatch, arena, pool, scattered
from services.worker.config import CudaConfig
from services.worker.contracts.mover import Copy
from services.worker.native.cuda.capacity import CudaSizes

if TYPE_CHECKING:
    from services.worker.native.cuda.runner import CudaRunner

BATCH = 32
BATCH_BLOCKS = 64
IN_LINE = 12
"""Batches under way in each direction: 28 ms of copies, which is longer than a step."""
STEPS = 10
ROUNDS = 20
SPARE_BYTES = 4 << 30
WAYS: dict[str, tuple[bool, ...]] = {"alone": (), "offload": (False,), "onboard": (True,), "both": (False, True)}
"""The directions that copy; True stands for loads."""


class StepDelayRow(Struct, frozen=True):
    """The steps during one kind of copies."""

    beside: str
    step_ms: float
    times: float
    """The step's time as a multiple of the step alone."""
    device_ms: float
    device_times: float
    saved_gb_per_s: float
    loaded_gb_per_s: float


class Saturation:
    """Keeps a mover busy with saves and loads."""

    def __init__(self, asked: EndedBatch, copies: Sequence[Copy]) -> None:
        """Save the first half of the copies again and again, and load the second half."""
        self._asked = asked
        batches = [copies[first : first + BATCH_BLOCKS] for first in range(0, len(copies), BATCH_BLOCKS)]
        half = len(batches) // 2
        self._batches = {False: cycle(batches[:half]), True: cycle(batches[half:])}

    def turn(self, directions: Sequence[bool]) -> None:
        """Ask again for the copies that have ended."""
        self._asked.hear()
        for loads in directions:
            for _ in range(self._asked.under_way(loads=loads), IN_LINE):
                self._asked.ask(next(self._batches[loads]), loads=loads)


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("beside", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for the pool")


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure steps with each kind of copies."""
    from services.worker.native.cuda.runner import CudaRunner

    config = llama.shape(quick=flags.quick)
    memory = llama.device_memory()
    block_bytes = llama.block_bytes(config)
    used, spare = llama.blocks(BATCH), SPARE_BYTES // block_bytes
    runner = CudaRunner(
        config,
        llama.random_weights(config),
        memory,
        CudaConfig(graph_upper_bound=BATCH),
        CudaSizes(capacity_blocks=used + spare, max_running=BATCH, max_rows=BATCH),
    )
    llama.Random(1.0).fill(runner.pages)
    with pool(flags.memory, SPARE_BYTES + (256 << 20)) as (path, geometry), arena(path, geometry, block_bytes) as slots:
        mover = runner.mover(time.perf_counter)
        mover.attach(slots)
        asked = EndedBatch(mover)
        copies = scattered(slots, range(used, used + spare))
        asked.move(copies, (), BATCH_BLOCKS)  # pins what is not pinned yet
        rows = _rows(runner, asked, Saturation(asked, copies), rounds=4 if flags.quick else ROUNDS)
        paths = dict(asked.paths)
        mover.detach()
        mover.close()
    times = {row.beside: row.times for row in rows}
    figures = {
        "decode step beside a saturating offload": times["offload"],
        "decode step beside a saturating onboard": times["onboard"],
        "decode step beside both": times["both"],
    }
    return part.PartReport(figures, rows, {"paths": paths})


def _rows(runner: CudaRunner, asked: EndedBatch, saturation: Saturation, *, rounds: int) -> list[StepDelayRow]:
    works = llama.decoding(BATCH, BATCH)
    step_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    device_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, directions in WAYS.items():
            saturation.turn(directions)
            runner.step(works)  # the first after the others' copies have ended
            before, begun_s = dict(asked.moved_bytes), time.perf_counter()
            for _ in range(STEPS):
                saturation.turn(directions)
                step_ms[way].append(llama.step_ms(runner, works))
                saturation.turn(directions)
                device_ms[way].append(llama.device_ms(runner, works))
            asked.hear()
            took_s = time.perf_counter() - begun_s
            saved, loaded = ((asked.moved_bytes[loads] - before[loads]) / 1e9 / took_s for loads in (False, True))
            rates[way].append((saved, loaded))
            asked.wait()
    steps = {way: (median(step_ms[way]), median(device_ms[way])) for way in WAYS}
    step_alone_ms, device_alone_ms = steps["alone"]
    return [
        StepDelayRow(
            beside=way,
            step_ms=step,
            times=step / step_alone_ms,
            device_ms=device,
            device_times=device / device_alone_ms,
            saved_gb_per_s=median(saved for saved, _ in rates[way]),
            loaded_gb_per_s=median(loaded for _, loaded in rates[way]),
        )
        for way, (step, device) in steps.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
