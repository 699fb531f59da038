"""Does one frontend process carry 4,000 streams at 100 ms a step without losing any, and what does a stream weigh?

All streams have prompts of 512 tokens and a connection of their own; they start one after another, run together for a
while, and end. A stream is lost if it has an error, no [DONE], or too few tokens. A stream that lags gets several
tokens in one event, so its tokens are those of the usage at its end.

rss a stream     the frontend's largest RSS, less its RSS after some single requests, divided by the streams

What could mislead: the load generator and both workers share the machine. With two cores all of it may be slower than
100 ms a step; then tokens come together, which the events a token show. Allocators keep memory that they once had, so
the largest RSS is also that of the bursts at the start.

    python -m benchmarks.serving_many [--streams 4000] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import ENDLESS, LOAD_LIMIT_S, NO_TIME, Generator, GeneratorReport
from benchmarks.serving_stacks import RunningStack, ours

STREAMS = 4000
STEP_S = 0.1
OUTPUT_TOKENS = 400
RSS_GOAL_KB = 60.0
SAMPLE_S = 0.25
WORKER = {
    "HEADRACE_SIMULATED_FIXED_S": str(STEP_S),
    "HEADRACE_MAX_RUNNING": "4096",
    "HEADRACE_MAX_WAITING": "4096",
    "HEADRACE_MAX_WAITING_TOKENS": "4194304",
    "HEADRACE_CAPACITY_BLOCKS": "262144",
}
WITH_USAGE = '{"ignore_eos": true, "stream_options": {"include_usage": true}}'


class ServingManyRow(Struct, frozen=True):
    """The result of the run."""

    streams: int
    tokens: int
    """The tokens of each stream."""
    load: GeneratorReport
    frontend_cpu_us_a_token: float
    rss_before_mb: float
    rss_largest_mb: float


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    _allow_files(4 * flags.streams + 1000)
    row = _measure(flags.streams, OUTPUT_TOKENS // 4 if flags.quick else OUTPUT_TOKENS)
    found = goals(row)
    if flags.json:
        print(msgspec.json.encode(report("serving_many", sys.argv[1:], found, [row])).decode())
        return 0
    print(
        f"{row.streams} streams of {row.tokens} tokens: {row.load.ev_per_req / row.tokens:.2f} events a token, "
        f"{row.load.tpot_p50_ms:.0f} ms a token, gap p99 {row.load.gap_p99_ms} ms, "
        f"frontend {row.frontend_cpu_us_a_token:.1f} µs a token, errors {row.load.errors}"
    )
    for goal in found:
        print(f"{goal.name}: {goal.value:.1f} {goal.unit} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


def goals(row: ServingManyRow) -> list[Goal]:
    """Require that no stream is lost and that memory stays small."""
    lost = row.streams - row.load.n + row.load.cut
    rss_kb = 1e3 * (row.rss_largest_mb - row.rss_before_mb) / row.streams
    return [
        Goal("streams lost or cut short", lost, "streams", 0, lost == 0),
        Goal("frontend's rss a stream", rss_kb, "kB", RSS_GOAL_KB, rss_kb < RSS_GOAL_KB),
    ]


def _measure(streams: int, tokens: int) -> ServingManyRow:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        generator = Generator(None, directory)
        settings = ENDLESS | NO_TIME | WORKER
        with ours(generator.model, directory / "ours", worker=settings) as stack:
            generator.run(stack, 1, 20, "--osl", "4")
            before_mb = stack.costs()["frontend"].rss_mb
            with _largest(stack) as sizes_mb:
                more = ("--ramp", str(tokens * STEP_S / 2), "--osl", str(tokens), "--timeout", str(LOAD_LIMIT_S))
                load, spent = generator.run(stack, streams, streams, *more, "--extra", WITH_USAGE)
        cpu_us = 1e6 * spent["frontend"].cpu_s / (streams * tokens)
        return ServingManyRow(streams, tokens, load, cpu_us, before_mb, max(sizes_mb))


@contextmanager
def _largest(stack: RunningStack) -> Iterator[list[float]]:
    """Sample the frontend's resident memory, in MB, while the context is open."""
    sizes_mb: list[float] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            sizes_mb.append(stack.costs()["frontend"].rss_mb)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes_mb
    finally:
        over.set()
        thread.join()


def _allow_files(count: int) -> None:
    """Raise the limit of open files to `count`, for this process and its children. Raises SystemExit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"{count} open files are needed; the limit is {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


if __name__ == "__main__":
    sys.exit(main())
