"""One worker through the whole stack with kvbm, of its engine alone; and sampled answers, of greedy ones.

    python -m benchmarks.gpu.stack [--rounds 3] [--model DIRECTORY] [--memory TMPFS] [--tokenizer DIRECTORY] [--quick]
                                   [--json]

`engine` runs in a process of its own, without a network or a kvbm (`benchmarks.gpu.engine`); the stack is NATS, a
frontend, a router, a worker and kvbm, asked over HTTP. Each has half of the GPU's memory, and both run all the time.
Closed loops of 1 to 128 streams, of 512 tokens in and 128 out, come in turn. Then the stack alone has 64 streams with
each kind of sampling in turn: greedy, the parameters on the bundled model's card, and top_p at a higher temperature.
In each second round the sides come in the other order. A figure is the median of the rounds' ratios.

What could mislead: an idle side still has its processes on the machine and its memory on the GPU. In the engine alone
requests are submitted between two steps, and over HTTP in the middle of one. A prompt of the stack is text with a chat
template, of 512 tokens but for a few. Weights are random, so distributions are flat, which is the worst case for top_p.
No two prompts of a run share anything, and each run of the engine alone begins with an empty cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import get_args

from benchmarks.gpu import part, serving
from benchmarks.gpu.model import add_model, model_in
from benchmarks.gpu.serving import GREEDY, GpuServingRow
from benchmarks.serving_stacks import RunningStack
from deploy.local.stack.model import SAMPLING
from deploy.local.stack.stack import Gpus
from services.worker.config import Device

LOADS = ((1, 16), (32, 160), (64, 320), (128, 512))
"""Streams, and requests of a run: 5 to 12 seconds each."""
SAMPLED_LOAD = LOADS[2]
MOST_STREAMS = 128
SHARE = serving.MEMORY_SHARE / 2
"""The share of the GPU's memory that each side has."""
ENGINE, STACK = "engine", "stack"
SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": GREEDY,
    "the card's sampling": SAMPLING,
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
}
Side = Callable[[int, int], GpuServingRow]
"""Runs a load of some streams and requests."""
Rounds = Sequence[Mapping[str, GpuServingRow]]
"""The rows of each round, by side."""


def main() -> int:
    """Print a table, or with --json one object."""
    return part.main("stack", __doc__, measure, _flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=get_args(Device), default="cuda", help="cpu: to try this out")
    parser.add_argument("--pool-bytes", type=int, default=serving.POOL_BYTES)
    add_model(parser)


def measure(flags: argparse.Namespace) -> part.PartReport:
    """Load both sides in turn, then the stack with each kind of sampling."""
    rounds, divisor = (1, 4) if flags.quick else (flags.rounds, 1)
    with (
        model_in(flags) as model,
        serving.engines(flags, model, 1, SHARE, MOST_STREAMS) as engines,
        _stack(flags, model) as running,
    ):
        asking = partial(_asked, running, model, count(1))
        asking(STACK, GREEDY, MOST_STREAMS, MOST_STREAMS)  # what is made at a first step is not measured
        sides = {ENGINE: partial(serving.ask_engines, ENGINE, engines), STACK: partial(asking, STACK, GREEDY)}
        loads = [(streams, max(streams, requests // divisor)) for streams, requests in LOADS]
        found = [list(in_turn(sides, rounds, *load)) for load in loads]
        drawing = {kind: partial(asking, kind, sampling) for kind, sampling in SAMPLINGS.items()}
        drawn = list(in_turn(drawing, rounds, SAMPLED_LOAD[0], SAMPLED_LOAD[1] // divisor))
    rows = [row for each in (*found, drawn) for of_round in each for row in of_round.values()]
    return part.PartReport(figures(found, drawn), rows)


def in_turn(sides: Mapping[str, Side], rounds: int, streams: int, requests: int) -> Iterator[dict[str, GpuServingRow]]:
    """Load the sides in turn; yield the rows of each round. In each second one the sides come in the other order."""
    for number in range(rounds):
        rows: dict[str, GpuServingRow] = {}
        for side in list(sides)[:: -1 if number % 2 else 1]:
            rows[side] = sides[side](streams, requests)
            print(rows[side], file=sys.stderr, flush=True)
        yield rows


def figures(loads: Sequence[Rounds], drawn: Rounds) -> dict[str, float]:
    """Return the medians of the rounds' ratios, and how many requests failed. *Pure.*"""
    made: dict[str, float] = {}
    for rounds in loads:
        streams = rounds[0][STACK].streams
        name = "1 stream" if streams == 1 else f"{streams} streams"
        pairs = [(each[STACK], each[ENGINE]) for each in rounds]
        made[f"{name}: output"] = median(stack.out_tok_s / engine.out_tok_s for stack, engine in pairs)
        made[f"{name}: first token p50"] = median(stack.ttft_p50_ms / engine.ttft_p50_ms for stack, engine in pairs)
    greedy, *others = SAMPLINGS
    for kind in others:
        made[f"{SAMPLED_LOAD[0]} streams, {kind}: output"] = median(
            each[kind].out_tok_s / each[greedy].out_tok_s for each in drawn
        )
    made["requests that failed"] = float(
        sum(row.failed for each in (*loads, drawn) for of in each for row in of.values())
    )
    return made


def _asked(
    running: RunningStack,
    model: Path,
    seeds: Iterator[int],
    what: str,
    sampling: Mapping[str, float],
    streams: int,
    requests: int,
) -> GpuServingRow:
    """Load the stack once."""
    load = serving.ask_streams(running, model, streams=streams, requests=requests, sampling=sampling, seed=next(seeds))
    return serving.stack_row(what, streams, requests, load)


@contextmanager
def _stack(flags: argparse.Namespace, model: Path) -> Iterator[RunningStack]:
    """Run the stack with one worker and kvbm. An idle engine is not asked for a token while the other side is
    measured."""
    worker = {"HEADRACE_MAX_RUNNING": str(MOST_STREAMS), "HEADRACE_HEALTH_IDLE_S": "0"}
    with serving.stack_on_gpus(flags, model, Gpus(1, SHARE), workers=1, worker=worker) as running:
        yield running


if __name__ == "__main__":
    sys.exit(main())
