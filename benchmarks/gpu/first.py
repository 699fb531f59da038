"""How soon does the first token come on a GPU, for a prompt of 8,192 tokens whose blocks are in kvbm's memory?

    python -m benchmarks.gpu.first [--tokens 8192] [--rounds 8] [--model DIRECTORY] [--memory TMPFS] [--quick] [--json]

It works like `benchmarks.kvbm_first`, with the native engine on the GPU and a model of Llama 8B's shape in bfloat16
(`benchmarks.gpu.model`). Worker, kvbm and NATS are processes; the device's pool holds one prompt, and two are asked for
in turn. `first` is the time from the request to the first token, less one step, which computes the prompt's last token:
the mean time between the tokens that follow. `alone` is one plain copy of as many bytes from pinned memory to the GPU,
made after each request: its bytes at the measured DMA rate. `computed` is the time of the second prompt when no tier
had its blocks.

What could mislead: all is wall time. The blocks lie in a tmpfs that the worker has pinned before the first request for
them. --quick asks for 2,048 tokens, for which the trips between processes weigh four times as much.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import kvbm_first
from benchmarks.gpu import part
from benchmarks.gpu.llama import block_bytes
from benchmarks.gpu.model import add_model, model_in
from benchmarks.kvbm_first import Subject
from services.worker.native.config import read_config

NAME = "first token of 8,192"


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("first", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8, help="three requests each")
    add_model(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure all rounds."""
    tokens, rounds = (2048, 3) if flags.quick else (flags.tokens, flags.rounds)
    with model_in(flags) as model:
        subject = Subject(model, block_bytes(read_config(model)), ("--device", "cuda"), ("host",), _copying)
        times = kvbm_first.measure(subject, flags.memory, None, tokens, rounds)
    first_ms, alone_ms = (
        median(each) for each in zip(*((row.first_ms, row.alone_ms) for row in times.rows), strict=True)
    )
    figures = {
        f"{NAME} from memory, less a step": first_ms / alone_ms,
        f"{NAME} from memory, a step and all": median(row.first_ms + row.step_ms for row in times.rows),
        f"{NAME}, computed": times.computed_ms[-1],
    }
    return part.PartReport(figures, times.rows, {"tokens": tokens, "computed_ms": times.computed_ms})


@contextmanager
def _copying(_memory: Path, blocks: int, block_bytes: int) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds of one plain copy of these bytes from pinned memory."""
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

    size_bytes = blocks * block_bytes
    host, device = cupy.cuda.alloc_pinned_memory(size_bytes), cupy.zeros(size_bytes, cupy.uint8)
    on = cupy.cuda.Stream(non_blocking=True)

    def seconds() -> float:
        begun_s = time.perf_counter()
        runtime.memcpyAsync(device.data.ptr, host.ptr, size_bytes, runtime.memcpyHostToDevice, on.ptr)
        on.synchronize()
        return time.perf_counter() - begun_s

    seconds()
    yield seconds


if __name__ == "__main__":
    sys.exit(main())
