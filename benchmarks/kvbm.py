"""What does the machine's block store cost, and how near is it to the limits of the machine?

    copies    an engine's mover compared with plain memcpy              benchmarks.kvbm_copies
    fetch     kvbm's answer: which blocks are where                     benchmarks.kvbm_fetch
    first     a prompt's first token from memory, and from disk         benchmarks.kvbm_first
    steps     the engine's steps, with and without storing              benchmarks.kvbm_steps
    disk      the disk tier compared with plain O_DIRECT                benchmarks.kvbm_disk

Each is a benchmark of its own, whose docstring says what it measures and what could mislead. This one runs them one
after another and puts their goals and rows into one object.

    python -m benchmarks.kvbm [--only copies …] [--memory TMPFS] [--directory DIR] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import kvbm_copies, kvbm_disk, kvbm_fetch, kvbm_first, kvbm_steps
from benchmarks.report import Goal, report
from deploy.local.stack.model import fetch_default

Measured = tuple[Sequence[Goal], Sequence[Any]]


def main() -> int:
    """Print each goal and its value, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for pools")
    parser.add_argument("--directory", type=Path, help="where disk tiers write; default: the temporary directory")
    parser.add_argument("--quick", action="store_true", help="a minute for each")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    goals: list[Goal] = []
    rows: list[dict[str, Any]] = []
    for name in flags.only:
        promised, measured = PARTS[name](flags)
        goals += promised
        rows += [{"part": name, **msgspec.to_builtins(row)} for row in measured]
    if flags.json:
        print(msgspec.json.encode(report("kvbm", sys.argv[1:], goals, rows)).decode())
        return 0
    for goal in goals:
        print(f"{goal.name:<52} {goal.value:8.3f} {goal.unit:<18} goal {goal.goal:g}  {'' if goal.met else 'NOT MET'}")
    return 0


def _copies(flags: argparse.Namespace) -> Measured:
    rows = kvbm_copies.measure(flags.memory, (128 if flags.quick else 512) << 20)
    return kvbm_copies.goals(rows), rows


def _fetch(flags: argparse.Namespace) -> Measured:
    rows = kvbm_fetch.measure(256, 100 if flags.quick else 300)
    return kvbm_fetch.goals(rows), rows


def _first(flags: argparse.Namespace) -> Measured:
    tokens, rounds = (512, 4) if flags.quick else (4096, 8)
    rows = kvbm_first.measure(kvbm_first.smol(), flags.memory, flags.directory, tokens, rounds).rows
    return kvbm_first.goals(rows), rows


def _steps(flags: argparse.Namespace) -> Measured:
    model = fetch_default(kvbm_steps.MODELS, lambda _what, _share: None)
    rows = uvloop.run(kvbm_steps.measure(model, 8, 8 if flags.quick else 30))
    return kvbm_steps.goals(rows), rows


def _disk(flags: argparse.Namespace) -> Measured:
    rows = kvbm_disk.measure(flags.directory, quick=flags.quick)
    return kvbm_disk.goals(rows), rows


PARTS: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "copies": _copies,
    "fetch": _fetch,
    "first": _first,
    "steps": _steps,
    "disk": _disk,
}


if __name__ == "__main__":
    sys.exit(main())
