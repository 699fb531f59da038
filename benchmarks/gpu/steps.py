"""How long a step with parts of prompts should be on a GPU: `worker.step_s`, through the whole stack.

    python -m benchmarks.gpu.steps [--step-s 0.25 0.05 …] [--rounds N] [--model DIRECTORY] [--tokenizer DIRECTORY]
                                   [--quick] [--json]

For each value, one worker with the whole GPU, a frontend and a router are started (no kvbm). Closed loops of 1 to 128
streams ask over HTTP, with prompts of 512 to 8,192 tokens and answers of 128. No two prompts share anything. In each
second round the values come in the other order.

What could mislead: in a closed loop a stream asks again when its answer ends, so that a slow setting also gets less
work. Weights and text are random; answers end by their length alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from msgspec import Struct

from benchmarks.gpu import part
from benchmarks.gpu.model import add_model, model_in
from benchmarks.gpu.serving import MEMORY_SHARE, NAME, START_LIMIT_S, ask_streams, load_figures
from benchmarks.serving_stacks import RunningStack, launched
from deploy.local.stack import servers
from deploy.local.stack.stack import Gpus, UpOptions

STEP_SECONDS = (0.25, 0.1, 0.05, 0.03)
MAX_RUNNING = 128
LOADS = (
    (512, 1, 4),
    (512, 16, 48),
    (512, 64, 192),
    (512, 128, 320),
    (2048, 1, 4),
    (2048, 16, 48),
    (2048, 64, 128),
    (2048, 128, 192),
    (8192, 1, 3),
    (8192, 16, 24),
    (8192, 64, 80),
)
"""Tokens of a prompt, streams, requests."""
QUICK = ((512, 16, 32), (8192, 16, 16))


class GpuStepsRow(Struct, frozen=True):
    """The result of one closed loop with one value of `step_s`."""

    step_s: float
    round: int
    input_tokens: int
    streams: int
    failed: int
    out_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("steps", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-s", type=float, nargs="+", default=list(STEP_SECONDS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this out")
    add_model(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Measure all values, round by round."""
    rows: list[GpuStepsRow] = []
    with model_in(flags) as model:
        for turn in range(flags.rounds):
            for step_s in flags.step_s if turn % 2 == 0 else flags.step_s[::-1]:
                for row in _rows(flags, model, step_s, turn):
                    print(row, file=sys.stderr, flush=True)
                    rows.append(row)
    return part.PartReport({}, rows, _medians(rows))


def _rows(flags: argparse.Namespace, model: Path, step_s: float, turn: int) -> Iterator[GpuStepsRow]:
    """Start a stack with this `step_s`; yield the row of each load."""
    with tempfile.TemporaryDirectory(prefix="gpu-steps-") as directory:
        options = UpOptions(
            model=str(model),
            model_name=NAME,
            port=servers.free_ports(1)[0],
            workers=1,
            gpus=Gpus(1, MEMORY_SHARE) if flags.device == "cuda" else None,
            discovery="file",
        )
        settings = {
            "router": {"HEADRACE_LOAD_RAMP_S": "0"},
            "worker": {"HEADRACE_MAX_RUNNING": str(MAX_RUNNING), "HEADRACE_STEP_S": str(step_s)},
        }
        with launched(options, Path(directory), settings, start_limit_s=START_LIMIT_S) as running:
            ask_streams(running, model, streams=32, requests=64, input_tokens=512, output_tokens=32, seed=1)
            for seed, load in enumerate(QUICK if flags.quick else LOADS, 2):
                yield _row(running, model, step_s, turn, load, seed)


def _row(
    running: RunningStack, model: Path, step_s: float, turn: int, load: tuple[int, int, int], seed: int
) -> GpuStepsRow:
    input_tokens, streams, requests = load
    spent = ask_streams(
        running,
        model,
        streams=streams,
        requests=requests,
        input_tokens=input_tokens,
        seed=seed,
    )
    return GpuStepsRow(
        step_s=step_s,
        round=turn,
        input_tokens=input_tokens,
        streams=streams,
        **load_figures(requests, spent),
    )


def _medians(rows: list[GpuStepsRow]) -> dict[str, float]:
    """Return the medians of all rounds, by a name that says which."""
    loads = dict.fromkeys((row.input_tokens, row.streams, row.step_s) for row in rows)
    found: dict[str, float] = {}
    for tokens, streams, step_s in loads:
        same = [row for row in rows if (row.input_tokens, row.streams, row.step_s) == (tokens, streams, step_s)]
        name = f"{tokens} in, {streams} streams, {step_s:g} s:"
        found[f"{name} output, tokens/s"] = median(row.out_tok_s for row in same)
        found[f"{name} first token p50, ms"] = median(row.ttft_p50_ms for row in same)
        found[f"{name} gap p99, ms"] = median(row.gap_p99_ms for row in same)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
