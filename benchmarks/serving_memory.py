"""Does the frontend's memory stay flat under load?

Runs of the load generator follow one another for `--hours`, with short requests at a high rate: streams of 8 tokens,
64 at once. After every tenth run a few clients leave in the middle. Samples are taken between the runs.

rss     of the frontend. Goal: no more than 5 % from the smallest to the largest in the second half
files   open descriptors of the frontend. Goal: as many at the end as at half time

What could mislead: a leak that shows only after hours does not show in a run of minutes. A leak of a byte a request
needs millions of requests to show, so the rows have the number of requests.

    python -m benchmarks.serving_memory [--hours 1] [--quick] [--json] [--plot FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import ENDLESS, NO_TIME, Generator
from benchmarks.serving_stacks import RunningStack, ours

STREAMS = 64
OUTPUT_TOKENS = 8
RUN_REQUESTS = 3000
QUICK_REQUESTS = 500
QUICK_RUNS = 4
LEAVE_EVERY = 10
LEAVING = ("--osl", "100000", "--leave", "0.5")
"""Flags of clients that leave long before the end."""
FLAT_GOAL = 0.05


class ServingMemoryRow(Struct, frozen=True):
    """The state after one run of the load generator."""

    at_s: float
    requests: int
    """How many requests have ended so far."""
    errors: int
    """The errors of this run."""
    rss_mb: dict[str, float]
    """The resident memory of each kind of process."""
    files: int
    """Open descriptors of the frontend."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = _measure(0.0 if flags.quick else 3600 * flags.hours, QUICK_REQUESTS if flags.quick else RUN_REQUESTS)
    found = goals(rows)
    if flags.plot:
        _plot(rows, flags.plot)
    if flags.json:
        print(msgspec.json.encode(report("serving_memory", sys.argv[1:], found, rows)).decode())
        return 0
    for row in rows[:: max(len(rows) // 15, 1)]:
        sizes = "  ".join(f"{kind} {size:.1f}" for kind, size in sorted(row.rss_mb.items()))
        print(f"{row.at_s:7.0f} s  {row.requests:8} requests  {row.errors} errors  {row.files:4} files  MB: {sizes}")
    for goal in found:
        print(f"{goal.name}: {goal.value:.3f} {goal.unit} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


def goals(rows: Sequence[ServingMemoryRow]) -> list[Goal]:
    """Compare the second half of the run with the goals."""
    late = rows[len(rows) // 2 :]
    sizes_mb = [row.rss_mb["frontend"] for row in late]
    spread = max(sizes_mb) / min(sizes_mb) - 1
    more = late[-1].files - late[0].files
    errors = sum(row.errors for row in rows)
    return [
        Goal("spread of the frontend's rss over the second half", spread, "share", FLAT_GOAL, spread <= FLAT_GOAL),
        Goal("files more at the end than at the half", more, "files", 0, more <= 0),
        Goal("requests that failed", errors, "requests", 0, errors == 0),
    ]


def _measure(limit_s: float, requests: int) -> list[ServingMemoryRow]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        generator = Generator(None, directory)
        with ours(generator.model, directory / "ours", worker=ENDLESS | NO_TIME) as stack:
            rows: list[ServingMemoryRow] = []
            began_s, sent = time.monotonic(), 0
            while len(rows) < QUICK_RUNS or time.monotonic() < began_s + limit_s:
                load, _ = generator.run(stack, STREAMS, requests, "--osl", str(OUTPUT_TOKENS))
                sent += requests
                errors = sum(load.errors.values())
                if len(rows) % LEAVE_EVERY == 1:
                    load, _ = generator.run(stack, STREAMS, 4 * STREAMS, *LEAVING)
                    sent += 4 * STREAMS
                    errors += sum(load.errors.values())
                rows.append(_row(stack, time.monotonic() - began_s, sent, errors))
            return rows


def _row(stack: RunningStack, at_s: float, requests: int, errors: int) -> ServingMemoryRow:
    rss_mb = {kind: cost.rss_mb for kind, cost in stack.costs().items()}
    files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in stack.pids("frontend"))
    return ServingMemoryRow(at_s, requests, errors, rss_mb, files)


def _plot(rows: Sequence[ServingMemoryRow], path: Path) -> None:
    from benchmarks.plot import Panel, draw  # matplotlib is among the development packages only

    minutes = [row.at_s / 60 for row in rows]
    memory = {kind: (minutes, [row.rss_mb[kind] for row in rows]) for kind in ("frontend", "router", "shell", "engine")}
    draw([Panel("Memory under load", "minutes", "MB", memory)], path, columns=1)


if __name__ == "__main__":
    sys.exit(main())
