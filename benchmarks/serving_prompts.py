"""Do five prompts of 100,000 tokens a second disturb the other streams?

256 streams of short prompts run at 20 ms a step, in phases with and without the long prompts, in turns. The engine
takes no time for a prefill, so only the serving path can disturb the streams: bodies of half a megabyte, template,
tokenising, hashing, routing 6,250 hashes, the prompt's way to the worker and the blocks' events.

rise    of the streams' inter-token p99 over all gaps of a phase: median of the phases with, less that of those without

What could mislead: long prompts cost CPU time (the rows say how much, by process). If all cores are busy, streams wait
for a core, which no frontend can avoid; the load generators run on the same cores. A prompt of the small model's
tokenizer has 2 bytes a token, a real one 4 to 5.

    python -m benchmarks.serving_prompts [--rate 5] [--repeats 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.serving_load import ENDLESS, NO_TIME, OUTPUT_TOKENS, Generator, GeneratorReport
from benchmarks.serving_stacks import RunningStack, ours

STREAMS = 256
ROUNDS = 5
STEP_S = 0.02
LONG_TOKENS = 100_000
LONG_OUTPUT_TOKENS = 16
PHASE_S = ROUNDS * OUTPUT_TOKENS * STEP_S
GOAL_MS = 20.0
WORKER = {
    "HEADRACE_SIMULATED_FIXED_S": str(STEP_S),
    "HEADRACE_MAX_RUNNING": "256",
    "HEADRACE_MAX_WAITING_TOKENS": str(64 << 20),
    "HEADRACE_CAPACITY_BLOCKS": "262144",
}


class ServingPromptsRow(Struct, frozen=True):
    """The result of one phase."""

    long: GeneratorReport | None
    """The report of the long prompts; None in a phase without them."""
    beside: GeneratorReport
    cpu_s: dict[str, float]
    """CPU seconds of each kind of process."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rate", type=float, default=5.0, help="long prompts a second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one phase of each")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = _measure(flags.rate, 1 if flags.quick else flags.repeats)
    found = goals(rows)
    if flags.json:
        print(msgspec.json.encode(report("serving_prompts", sys.argv[1:], found, rows)).decode())
        return 0
    for row in rows:
        spent = "  ".join(f"{kind} {seconds:.1f}" for kind, seconds in sorted(row.cpu_s.items()))
        long = (
            "without long prompts"
            if row.long is None
            else f"{row.long.n} long prompts, first token {row.long.ttft_p50_ms:.0f} ms"
        )
        print(
            f"gap p50 {row.beside.gap_p50_ms:6.1f}  p99 {row.beside.gap_p99_ms:7.1f} ms  "
            f"errors {row.beside.errors | (row.long.errors if row.long else {})}  {long}  CPU s: {spent}"
        )
    for goal in found:
        print(f"{goal.name}: {goal.value:.1f} {goal.unit} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


def goals(rows: list[ServingPromptsRow]) -> list[Goal]:
    """Compare the rise with its goal, and require that no request failed."""
    with_ms, without_ms = (
        statistics.median(row.beside.gap_p99_ms or 0.0 for row in rows if (row.long is not None) == there)
        for there in (True, False)
    )
    rise_ms = with_ms - without_ms
    failed = sum(sum(row.beside.errors.values()) + sum(row.long.errors.values() if row.long else ()) for row in rows)
    return [
        Goal("rise of the others' inter-token p99", rise_ms, "ms", GOAL_MS, rise_ms < GOAL_MS),
        Goal("requests that failed", failed, "requests", 0, failed == 0),
    ]


def _measure(rate: float, repeats: int) -> list[ServingPromptsRow]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        generator = Generator(None, directory)
        with ours(generator.model, directory / "ours", worker=ENDLESS | NO_TIME | WORKER) as stack:
            generator.run(stack, 16, 100)
            return [_phase(generator, stack, each) for _ in range(repeats) for each in (0.0, rate)]


def _phase(generator: Generator, stack: RunningStack, rate: float) -> ServingPromptsRow:
    with ThreadPoolExecutor(1) as beside:
        ramp = str(OUTPUT_TOKENS * STEP_S)
        streams = beside.submit(generator.run, stack, STREAMS, STREAMS * ROUNDS, "--ramp", ramp)
        long = None
        if rate:
            more = ("--rate", str(rate), "--isl", str(LONG_TOKENS), "--osl", str(LONG_OUTPUT_TOKENS))
            long, _ = generator.run(stack, 1, int(rate * PHASE_S), *more)
        load, spent = streams.result()
    return ServingPromptsRow(long, load, {kind: cost.cpu_s for kind, cost in spent.items()})


if __name__ == "__main__":
    sys.exit(main())
