"""What does a token cost on its way from the engine to the client, beside Dynamo in the same run?

    load generator ── HTTP, SSE ──▶ a stack: every process's CPU time from /proc, over all tokens of the run

Both stacks (`serving_stacks.py`) are up at once and take turns: ours, peer, ours, peer. Both have two workers that take
an engine's time without its arithmetic, the same model directory, KV routing and events; prompts are 512 tokens and
share nothing, answers 128 tokens, streamed. Every process but the load generator counts, on both sides. The load
generator is the yardstick's own; without a yardstick it is `sse_load.py`, and only ours is measured.

paced     a step takes 20 ms on both sides. Ours is told so; the yardstick's speed-up is calibrated for each number of
          streams until its time between tokens is within 3 % of ours, and a case counts only if this held in it.
          A run with less than 0.98 SSE events a token, or with an error, is refused: it did not do the work.
unpaced   engines 1,000 times as fast as a GPU: everything waits for the serving path, and tokens come together in
          fewer events where it is behind.

For those who make it cheaper, ours alone, in half a minute; the last line is the sum:

    python -m benchmarks.serving --ours --streams 128,512 --paced --quick [--peer DIR]
    python -m benchmarks.serving --ours --streams 512 --paced --quick --profile frontend|router|worker

With --peer its model and load generator are used for ours too, which the comparison does: its tokens are longer text.

What could mislead: wall-clock figures (tokens/s, time to first token) on a busy or small machine are the machine's, CPU
per token is less so; the other stack idles beside, which costs the caches a little; the first and last seconds of a run
have fewer streams than the case says, on both sides; CPU time in interrupts (loopback TCP) falls on whoever runs;
profiled processes cost about twice as much.

    python -m benchmarks.serving --peer DIR [--streams 32,128] [--paced|--unpaced] [--repeats 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.serving_stacks import NAME, Cost, Running, ours
from tests.tiny_model import write_tiny_model

STREAMS = (32, 128, 512)
INPUT_TOKENS = 512
OUTPUT_TOKENS = 128
STEP_S = 0.020
SPEEDUP = 1000
LEAST_EVENTS_A_TOKEN = 0.98
ROUNDS = 6
"""Requests of each stream in a paced run, one after another."""
QUICK_ROUNDS = 3
UNPACED_REQUESTS = 2000
LOAD_LIMIT_S = 300.0

PACED = {
    "HEADRACE_SIMULATED_FIXED_S": str(STEP_S),
    **{f"HEADRACE_SIMULATED_{name}_S": "0" for name in ("WEIGHTS", "ROW", "TOKEN", "PAIR", "KV_TOKEN")},
}
UNPACED = {"HEADRACE_SIMULATED_SPEED": str(SPEEDUP)}
COMMON = {"HEADRACE_SIMULATED_OUTPUT_TOKENS": "0", "HEADRACE_MAX_RUNNING": "256"}


class Report(Struct, frozen=True):
    """Of the load generator."""

    n: int
    errors: dict[str, int]
    elapsed_s: float
    out_tok_s: float
    ev_per_req: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    client_cpu_s: float
    short_streams: int


class Row(Struct, frozen=True):
    """One run of one case."""

    system: str
    pace: str
    streams: int
    us_a_token: float
    """All processes."""
    by_kind: dict[str, float]
    rss_mb: dict[str, float]
    load: Report
    refused: str
    """Why it does not count; empty: it does."""


class Generator:
    """Which load generator, and with what model."""

    def __init__(self, yardstick: Path | None, directory: Path) -> None:
        if yardstick is None:
            self.model = write_tiny_model(directory / "model", vocab=16_000, context_length=131_072)
            self._command = [sys.executable, "-m", "benchmarks.sse_load"]
        else:
            self.model = yardstick / "model"
            self._command = [str(yardstick / "venv" / "bin" / "python"), str(yardstick / "loadgen.py")]
        self._seed = 0

    def run(self, stack: Running, streams: int, requests: int, *flags: str) -> tuple[Report, dict[str, Cost]]:
        """One run, with what the stack spent from its first request to its last answer. New prompts each time."""
        self._seed += 1
        asked = {
            "--port": stack.port,
            "--model": NAME,
            "--tokenizer": self.model / "tokenizer.json",
            "-c": streams,
            "-n": requests,
            "--warmup": 0,
            "--isl": INPUT_TOKENS,
            "--osl": OUTPUT_TOKENS,
            "--seed": self._seed,
            "--extra": '{"ignore_eos": true}',
        }
        words = [str(word) for pair in asked.items() for word in pair]
        reading, writing = os.pipe()
        marks: dict[str, dict[str, Cost]] = {}
        watch = threading.Thread(target=_watch, args=(reading, stack, marks))
        watch.start()
        try:
            done = subprocess.run(
                [*self._command, *words, *flags, "--hook-fd", str(writing)],
                pass_fds=(writing,),
                capture_output=True,
                text=True,
                timeout=LOAD_LIMIT_S,
                check=False,
            )
        finally:
            os.close(writing)
            watch.join()
        if done.returncode:
            raise SystemExit(f"the load generator failed:\n{done.stderr[-2000:]}")
        before, after = marks["start"], marks["stop"]
        spent = {kind: Cost(cost.cpu_s - before[kind].cpu_s, cost.rss_mb) for kind, cost in after.items()}
        load = msgspec.json.decode(done.stdout, type=Report)
        if load.n == 0:
            raise SystemExit(f"no stream ended well: {load.errors}\n{done.stderr[-2000:]}")
        return load, spent


def _watch(reading: int, stack: Running, marks: dict[str, dict[str, Cost]]) -> None:
    """What the stack has cost when the load generator says start and stop."""
    with os.fdopen(reading) as lines:
        for line in lines:
            marks[line.strip()] = stack.costs()


def measure(generator: Generator, stack: Running, system: str, pace: str, streams: int, *, quick: bool) -> Row:
    """One run of one case."""
    if pace == "paced":
        # Slots start one after another over the time of one request: no waves of requests.
        requests = streams * (QUICK_ROUNDS if quick else ROUNDS)
        load, spent = generator.run(stack, streams, requests, "--ramp", str(OUTPUT_TOKENS * STEP_S))
    else:
        load, spent = generator.run(stack, streams, max(UNPACED_REQUESTS // (4 if quick else 1), 2 * streams))
    tokens = load.n * OUTPUT_TOKENS
    by_kind = {kind: 1e6 * cost.cpu_s / max(tokens, 1) for kind, cost in spent.items()}
    rss_mb = {kind: cost.rss_mb for kind, cost in spent.items()}
    return Row(system, pace, streams, sum(by_kind.values()), by_kind, rss_mb, load, refusal(load, pace))


def refusal(load: Report, pace: str) -> str:
    """Why a run does not count; empty: it does."""
    if load.errors:
        return f"errors: {load.errors}"
    if pace != "paced":
        return ""
    if load.short_streams:
        return f"{load.short_streams} of {load.n} streams ended early"
    share = load.ev_per_req / OUTPUT_TOKENS
    return f"{share:.2f} events a token" if share < LEAST_EVENTS_A_TOKEN else ""


def line(row: Row) -> str:
    """For people."""
    kinds = "  ".join(f"{kind} {us:.1f}" for kind, us in sorted(row.by_kind.items(), key=lambda item: -item[1]))
    load = row.load
    return (
        f"{row.system:5} {row.pace:8} {row.streams:4}  {row.us_a_token:6.1f} µs/token: {kinds}  | "
        f"{load.out_tok_s:7.0f} tokens/s  {load.ev_per_req / OUTPUT_TOKENS:.2f} events a token  "
        f"step {load.tpot_p50_ms:.1f} ms  gap p99 {load.gap_p99_ms} ms  first {load.ttft_p50_ms:.0f} / "
        f"{load.ttft_p99_ms:.0f} ms  client {1e6 * load.client_cpu_s / max(load.n, 1) / OUTPUT_TOKENS:.1f} µs"
        + (f"  REFUSED: {row.refused}" if row.refused else "")
    )


def main() -> int:
    """Print a table, or with --json one object."""
    flags = _flags()
    streams = [int(word) for word in flags.streams.split(",")]
    paces = [pace for pace in ("paced", "unpaced") if getattr(flags, pace)] or ["paced", "unpaced"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        generator = Generator(flags.peer, Path(name))
        for pace in paces:
            worker = COMMON | (PACED if pace == "paced" else UNPACED)
            with ours(generator.model, Path(name) / pace, worker=worker, profile=flags.profile) as stack:
                generator.run(stack, 16, 100)
                for count in streams:
                    for _ in range(1 if flags.quick else flags.repeats):
                        rows.append(measure(generator, stack, "ours", pace, count, quick=flags.quick))
                        if not flags.json:
                            print(line(rows[-1]), flush=True)
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--peer", type=Path, help="the yardstick's directory, with stack.py, loadgen.py, model and venv"
    )
    parser.add_argument("--ours", action="store_true", help="ours alone")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--paced", action="store_true", help="only paced")
    parser.add_argument("--unpaced", action="store_true", help="only unpaced")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="", choices=("", "frontend", "router", "worker"))
    parser.add_argument("--quick", action="store_true", help="one short run of each case")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
