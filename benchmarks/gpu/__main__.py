"""Measures all goals on a GPU and prints one table.

    copies      scattered blocks between the GPU and a pool, against plain copies of pinned memory
    `beside`    a decode step while blocks are copied at the same time
    memory      allocations: what one costs, and how many a decode step makes
    decode      decode and prefill of an 8B Llama shape, against the memory's rate and the tensor cores'
    torch_llama the same steps, of a compiled model's in torch
    kernels     where the time of these steps goes, kernel by kernel
    attention   the attention of prompts alone, and cuDNN's
    sampling    whole steps with each kind of sampling, of greedy's
    images      a vision tower, of torch's, and embeddings from a pool to the GPU
    parallel    a model over several ranks: steps, sums, and blocks that all of them copy
    first       the first token of a prompt whose blocks are in kvbm's memory
    lifetimes   starts, sleeps, take-overs and turns of engines
    stack       one worker with everything around it, of its engine alone; sampled answers, of greedy ones
    serving     everything: NATS, frontend, router, two workers on the GPU, kvbm

Each part is a benchmark of its own (`python -m benchmarks.gpu.PART`), whose docstring says what could mislead. It runs
in a process of its own, so that all of the GPU's memory is free for the next one. `first`, `lifetimes`, `stack`
and `serving` need a model of 15 GB, which is written into the tmpfs and removed again, unless --model names a directory
that `benchmarks.gpu.model` has written.

    python -m benchmarks.gpu [--only PART …] [--memory TMPFS] [--model DIRECTORY] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import msgspec

from benchmarks.gpu.model import add_model, model_in
from benchmarks.gpu.part import gpu_or_exit
from benchmarks.gpu.table import PARTS, lines
from benchmarks.report import ROOT, Goal, report

SERVED = ("first", "lifetimes", "stack", "serving")
"""Parts that take a model's directory."""
POOLED = ("copies", "beside", "parallel", "images", *SERVED)
"""Parts that take a tmpfs."""


def main() -> int:
    """Print the table, or with --json one object. The exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    add_model(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    machine = gpu_or_exit()
    told: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    with ExitStack() as made:
        model = made.enter_context(model_in(flags)) if set(SERVED) & set(flags.only) else None
        for part in flags.only:
            words = ["--memory", str(flags.memory)] if part in POOLED else []
            words += ["--model", str(model)] if part in SERVED else []
            words += ["--quick"] if flags.quick else []
            ended = _told(part, words)
            if ended is None:
                failed.append(part)
            else:
                told[part] = ended
    figures = {part: each["figures"] for part, each in told.items()}
    goals = [msgspec.convert(goal, Goal) for each in told.values() for goal in each["goals"]]
    rows = [{"part": part, **row} for part, each in told.items() for row in each["rows"]]
    if flags.json:
        whole = report("gpu", sys.argv[1:], goals, rows)
        whole |= {"gpu": machine, "figures": figures, "failed": failed}
        whole |= {"yardsticks": {part: each["yardsticks"] for part, each in told.items()}}
        print(msgspec.json.encode(whole).decode())
    else:
        print("\n".join(lines(flags.only, figures)))
    return 1 if failed else 0


def _told(part: str, words: list[str]) -> dict[str, Any] | None:
    """Run a part and return its report; None if it failed."""
    print(f"{part} …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"benchmarks.gpu.{part}", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{part} ended with status {done.returncode}\n{done.stdout[-2000:]}", file=sys.stderr)
        return None
    ended: dict[str, Any] = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2])
    return ended


if __name__ == "__main__":
    sys.exit(main())
