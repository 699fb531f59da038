"""How long does the first token take, when there is no other request and the engine takes no time?

One request runs at a time, with 512 tokens in and 8 out, timed by the client: HTTP, template, tokens, the router's
choice, the worker, one step, and back. Ours and the yardstick take turns; our steps take no time, and the yardstick is
1,000 times as fast as a GPU, so that the serving path's time remains.

It runs twice: once as most clients read, and once with TCP_QUICKACK, which hides that a server waits for
acknowledgements before it sends more (Nagle's algorithm; 40 ms). The goal is judged with it, where the yardstick is at
its best.

What could mislead: on a busy machine every process waits for a core, several times in a request; the yardstick's
thousandth of a prefill is some 0.1 ms.

    python -m benchmarks.serving_first [--peer DIR] [--repeats 5] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import ENDLESS, NO_TIME, Generator, GeneratorReport
from benchmarks.serving_stacks import ours, peer

REQUESTS = 200
OUTPUT_TOKENS = "8"
SPEEDUP = 1000
GOAL_MS = 3.0


class ServingFirstRow(Struct, frozen=True):
    """The result of one run."""

    system: str
    quick_acks: bool
    load: GeneratorReport


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--peer", type=Path, help="the yardstick's directory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two repeats")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = _measure(flags.peer, 2 if flags.quick else flags.repeats)
    found = goals(rows)
    if flags.json:
        print(msgspec.json.encode(report("serving_first", sys.argv[1:], found, rows)).decode())
        return 0
    for row in rows:
        acks = "quick acks" if row.quick_acks else "plain"
        print(f"{row.system:5} {acks:10}  p50 {row.load.ttft_p50_ms:7.2f} ms  p99 {row.load.ttft_p99_ms:7.2f} ms")
    for goal in found:
        value = "no yardstick" if goal.value is None else f"{goal.value:.2f} {goal.unit}"
        print(f"{goal.name}: {value} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


def _measure(yardstick: Path | None, repeats: int) -> list[ServingFirstRow]:
    rows: list[ServingFirstRow] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        directory = Path(name)
        generator = Generator(yardstick, directory)
        stacks = {"ours": started.enter_context(ours(generator.model, directory / "ours", worker=ENDLESS | NO_TIME))}
        if yardstick is not None:
            stacks["peer"] = started.enter_context(peer(yardstick, directory / "peer", speedup=SPEEDUP))
        for stack in stacks.values():
            generator.run(stack, 1, REQUESTS, "--osl", OUTPUT_TOKENS)
        for _ in range(repeats):
            for quick_acks in (False, True):
                for system, stack in stacks.items():
                    acks = "1" if quick_acks else "0"
                    load, _ = generator.run(stack, 1, REQUESTS, "--osl", OUTPUT_TOKENS, "--quickack", acks)
                    if load.errors:
                        raise SystemExit(f"{system}: {load.errors}")
                    rows.append(ServingFirstRow(system, quick_acks, load))
    return rows


def goals(rows: list[ServingFirstRow]) -> list[Goal]:
    """Compare the medians of the repeats with quick acknowledgements with the goals."""
    medians = {
        system: statistics.median(times)
        for system in ("ours", "peer")
        if (times := [row.load.ttft_p50_ms for row in rows if row.system == system and row.quick_acks])
    }
    mine = medians["ours"]
    ratio = mine / medians["peer"] if "peer" in medians else None
    return [
        Goal("time to the first token, p50", mine, "ms", GOAL_MS, mine <= GOAL_MS),
        Goal("the same, of the yardstick's", ratio, "times", 1.0, ratio is not None and ratio < 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
