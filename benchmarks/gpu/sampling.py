"""Whole steps of 64 decodes of the 8B Llama shape with each kind of sampling, of the same step with greedy rows.

    python -m benchmarks.gpu.sampling [--quick] [--json]

What could mislead: weights are random, so the distributions are flat, which is the worst case for top_p. Each kind has
a step in turn, by a host clock around the Runner's whole step, drawing and waiting included; the median of some rounds.
The context is short (512 tokens), so that sampling weighs more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.gpu import llama, part
from services.worker.config import CudaConfig
from services.worker.contracts.runner import Work
from services.worker.native.cuda.capacity import CudaSizes
from shared.messages.generate import Sampling

BATCH, CONTEXT = 64, 512
KINDS: Mapping[str, Sampling] = {
    name: replace(Sampling(max_tokens=1 << 20), **settings)
    for name, settings in dict[str, dict[str, Any]](
        {
            "greedy": {"temperature": 0.0},
            "temperature": {"temperature": 0.8},
            "top_p": {"temperature": 0.8, "top_p": 0.9},
            "top_k": {"temperature": 0.8, "top_k": 40},
            "min_p": {"temperature": 0.8, "min_p": 0.05},
            "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
            "bias": {"logit_bias": ((5, 2.0), (7, -100.0))},
            "all of these": {
                **{"temperature": 0.8, "top_p": 0.9, "top_k": 1000, "min_p": 0.001, "presence_penalty": 0.5},
                **{"frequency_penalty": 0.5, "repetition_penalty": 1.1},
            },
            "logprobs 0": {"logprobs": 0},
            "logprobs 5": {"logprobs": 5},
            "logprobs 20": {"logprobs": 20},
        }
    ).items()
}
ONE = "one row with top_p"


class SamplingRow(Struct, frozen=True):
    """The time of a whole step with one kind of sampling."""

    kind: str
    rows: int
    step_ms: float
    least_ms: float
    of_greedy: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("sampling", __doc__, measure)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Give each kind of sampling a step in turn."""
    from services.worker.native.cuda.runner import CudaRunner

    config = llama.shape(quick=flags.quick)
    memory = llama.device_memory()
    runner = CudaRunner(
        config,
        llama.random_weights(config),
        memory,
        CudaConfig(graph_upper_bound=BATCH),
        CudaSizes(capacity_blocks=llama.blocks(BATCH) + BATCH, max_running=BATCH, max_rows=BATCH),
    )
    llama.Random(1.0).fill(runner.pages)
    ways = {kind: works(sampling, number) for number, (kind, sampling) in enumerate(KINDS.items())}
    ways[ONE] = works(KINDS["greedy"], len(KINDS))
    ways[ONE][BATCH // 2].sampling = KINDS["top_p"]
    times: dict[str, list[float]] = {kind: [] for kind in ways}
    for number in range((4 if flags.quick else 20) + 2):
        for kind, each in ways.items():
            llama.step_ms(runner, each)  # what is kept of a sequence is kept from one step to the next
            ms = llama.step_ms(runner, each)
            if number >= 2:  # warm
                times[kind].append(ms)
    runner.close()
    greedy = median(times["greedy"])
    rows = [SamplingRow(kind, BATCH, median(ms), min(ms), median(ms) / greedy) for kind, ms in times.items()]
    figures = {f"64 rows, {row.kind}": row.of_greedy for row in rows if row.kind != "greedy"}
    return part.PartReport(figures, rows, {"greedy_ms": greedy})


def works(sampling: Sampling, number: int) -> list[Work]:
    """Make decoding works with one kind of sampling, each with its own seed. They are other sequences than those of
    other numbers."""
    made = llama.decoding(BATCH, BATCH, end=CONTEXT)
    for work in made:
        work.sampling = replace(sampling, seed=work.sequence)
        work.sequence += number * BATCH
        work.prompt_tokens = work.end - 100
    return made


if __name__ == "__main__":
    sys.exit(main())
