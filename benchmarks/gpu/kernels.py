"""Where does the time of a step go, kernel by kernel? An 8B Llama shape in bfloat16 on one GPU.

    python -m benchmarks.gpu.kernels [--quick] [--json]

An event is recorded after each kernel of a step that is launched eagerly, and a kernel's time is that from the event
before to its own. All launches wait for a kernel that spins meanwhile, so that the GPU never waits for the host. The
median of some steps counts; equal kernels of all layers are one row.

What could mislead: an event between two kernels costs a microsecond or two (`event_us`, which is taken off), and keeps
the end of one kernel from overlapping the begin of the next. So the sum is more than the time of the same step without
events, `whole_ms`, and a captured graph is faster again. What a kernel leaves in the cache for the next one counts for
the next. --quick has a quarter of the layers, so that the logits weigh more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from benchmarks.gpu import llama, part
from services.worker.config import CudaConfig
from services.worker.contracts.runner import Work
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import CudaSizes

if TYPE_CHECKING:
    from services.worker.native.cuda.runner import CudaRunner

R = TypeVar("R")
BATCHES = (1, 32, 128)
PROMPTS = {"prefill of 8,192": (0, 8192), "the fourth 8,192 of 32,768": (24_576, 8192)}
"""Positions that were computed before, and tokens of the prompt's part."""
SPIN_S = 0.15
"""Seconds for which the launches of a step are held back."""
PRODUCTS = ("qkv", "output", "gate and up", "down", "logits")
ATTENTION = ("attend_decode", "merge_splits", "attend_prefill")

_SPIN = r"""
extern "C" __global__ void spin(long long ns) {
  long long begun, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begun < ns);
}
"""


class KernelRow(Struct, frozen=True):
    """The time of all launches of one kernel in a step."""

    step: str
    kernel: str
    launches: int
    ms: float
    share: float
    """The quotient ms ÷ sum of all kernels."""


class StepSum(Struct, frozen=True):
    """A step's kernels together, and the step without events between them."""

    step: str
    sum_ms: float
    whole_ms: float


class Clock:
    """Records an event after each launch."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.marks: list[tuple[str, Any]] = []
        """What was launched, and the event after it."""

    def mark(self, what: str) -> None:
        import cupy as cp  # pyright: ignore[reportMissingImports]

        event = cp.cuda.Event()
        event.record(self._stream)
        self.marks.append((what, event))

    def spent_ms(self) -> list[tuple[str, float]]:
        """Return the time of each launch, once all are done. The first mark only begins."""
        import cupy as cp  # pyright: ignore[reportMissingImports]

        self._stream.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(what, float(cp.cuda.get_elapsed_time(before, after))) for (_, before), (what, after) in pairs]


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("kernels", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure each kind of step."""
    from services.worker.native.cuda.runner import CudaRunner

    config = llama.shape(quick=flags.quick)
    most = max(BATCHES)
    memory = llama.device_memory()
    runner = CudaRunner(
        config,
        llama.random_weights(config),
        memory,
        CudaConfig(graphs=False),
        CudaSizes(capacity_blocks=llama.blocks(most), max_running=most),
    )
    llama.Random(1.0).fill(runner.pages)
    steps = {f"decode, batch {batch}": llama.decoding(batch, most) for batch in BATCHES}
    for name, (before, tokens) in PROMPTS.items():
        slots = list(range((before + tokens) // llama.BLOCK_SIZE))
        steps[name] = [llama.work(0, before, before + tokens, slots)]
    event_ms = _event_ms(runner)
    rows: list[KernelRow] = []
    sums: list[StepSum] = []
    for name, works in steps.items():
        found = part.attempted(name, partial(_rows, config, runner, name, works, event_ms))
        rows += found
        if found:
            whole_ms = median(_held(runner, partial(llama.device_ms, runner, works)) for _ in range(5))
            sums.append(StepSum(name, sum(row.ms for row in found), whole_ms))
    runner.close()
    return part.PartReport(_figures(rows), [*rows, *sums], {"event_us": event_ms * 1e3})


def _figures(rows: list[KernelRow]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for row in rows:
        what = "products" if row.kernel in PRODUCTS else "attention" if row.kernel in ATTENTION else "the rest"
        name = f"{row.step}: {what}"
        figures[name] = figures.get(name, 0.0) + row.share
    return figures


def _rows(config: ModelConfig, runner: CudaRunner, name: str, works: list[Work], event_ms: float) -> list[KernelRow]:
    runs: list[dict[str, float]] = []
    launches: dict[str, int] = {}
    for number in range(7):
        clock = Clock(runner.stream)
        with _timed(runner, config, clock):
            _held(runner, partial(runner.logits, works))
        spent: dict[str, float] = {}
        launches = {}
        for what, ms in clock.spent_ms():
            spent[what] = spent.get(what, 0.0) + max(0.0, ms - event_ms)
            launches[what] = launches.get(what, 0) + 1
        if number >= 2:  # warm
            runs.append(spent)
    medians = {what: median(run[what] for run in runs) for what in launches}
    whole = sum(medians.values())
    by_time = sorted(medians.items(), key=lambda each: -each[1])
    return [KernelRow(name, what, launches[what], ms, ms / whole) for what, ms in by_time]


def _held(runner: CudaRunner, enqueue: Callable[[], R]) -> R:
    """Enqueue work after a kernel that spins, so that the GPU has all of it when it begins."""
    import cupy as cp  # pyright: ignore[reportMissingImports]
    import numpy as np

    runner.stream.synchronize()
    with runner.stream:
        cp.RawKernel(_SPIN, "spin")((1,), (1,), (np.int64(SPIN_S * 1e9),))
    made = enqueue()
    runner.stream.synchronize()
    return made


def _event_ms(runner: CudaRunner) -> float:
    """Return the time between two events with nothing between them."""

    def marked() -> list[tuple[str, float]]:
        clock = Clock(runner.stream)
        for _ in range(200):
            clock.mark("nothing")
        return clock.spent_ms()

    return median(ms for _, ms in _held(runner, marked))


@contextmanager
def _timed(runner: CudaRunner, config: ModelConfig, clock: Clock) -> Iterator[None]:
    """Have the clock see each launch of the runner's decoder."""
    decoder: Any = runner._decoder
    kernels, blas = decoder._kernels, decoder._blas

    def seen(name: str, launch: Any) -> Any:
        def launched(grid: Any, block: Any, arguments: Any, **more: Any) -> None:
            if not clock.marks:
                clock.mark("")
            launch(grid, block, arguments, **more)
            weight = arguments[2] if name in ("row_product", "row_swiglu") else None
            clock.mark(name if weight is None else product_name(config, weight.shape))

        return launched

    changed: dict[str, Any] = {}
    for each in fields(kernels):
        kernel = getattr(kernels, each.name)
        if each.name == "attend_prefill" and kernel is not None:
            changed[each.name] = replace(kernel, kernel=seen(each.name, kernel.kernel))
        elif callable(kernel):
            changed[each.name] = seen(each.name, kernel)
    decoder._kernels, decoder._blas = replace(kernels, **changed), _SeenBlas(blas, config, clock)
    try:
        yield
    finally:
        decoder._kernels, decoder._blas = kernels, blas


class _SeenBlas:
    """Products that the clock sees."""

    def __init__(self, blas: Any, config: ModelConfig, clock: Clock) -> None:
        self._blas = blas
        self._config = config
        self._clock = clock

    def product(self, out: Any, x: Any, weight: Any, **more: Any) -> None:
        self._blas.product(out, x, weight, **more)
        self._clock.mark(product_name(self._config, weight.shape))


def product_name(config: ModelConfig, shape: tuple[int, ...]) -> str:
    """Return which product has a weight of this shape. *Pure.*"""
    shapes: dict[tuple[int, ...], str] = {
        (config.queries + 2 * config.keys, config.hidden): "qkv",
        (config.hidden, config.queries): "output",
        (2 * config.intermediate, config.hidden): "gate and up",
        (config.hidden, config.intermediate): "down",
        (config.vocab, config.hidden): "logits",
    }
    return shapes[shape]


if __name__ == "__main__":
    sys.exit(main())
