"""Runs a load generator against a stack, and measures the CPU time that the stack spends meanwhile.

Generator.run ──▶ a process, the yardstick's loadgen.py or sse_load.py ──▶ its report
      │  start, stop: what each process of the stack has cost so far
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.serving_stacks import NAME, Cost, RunningStack
from tests.tiny_model import write_tiny_model

INPUT_TOKENS = 512
OUTPUT_TOKENS = 128
LOAD_LIMIT_S = 600.0
"""The time limit of long streams, in seconds; a run may take twice as long."""
NO_TIME = {f"HEADRACE_SIMULATED_{name}_S": "0" for name in ("FIXED", "WEIGHTS", "ROW", "TOKEN", "PAIR", "KV_TOKEN")}
"""Settings of an engine whose steps take no time."""
ENDLESS = {"HEADRACE_SIMULATED_OUTPUT_TOKENS": "0"}
"""Settings of an engine whose answers end only at max_tokens."""


class GeneratorReport(Struct, frozen=True):
    """The report of the load generator."""

    n: int
    errors: dict[str, int]
    elapsed_s: float
    ev_per_req: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    """A stream's time from its first event to its end, divided by its tokens less one."""
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    client_cpu_s: float
    short_streams: int
    """Streams with less than 95 % of the requested events."""
    cut: int = 0
    """Streams whose usage, if it was requested, reports another number of tokens than requested."""


class Generator:
    """A load generator and its model."""

    def __init__(self, yardstick: Path | None, directory: Path) -> None:
        """Use the yardstick's generator and model, or without it `sse_load.py` and a small random model."""
        if yardstick is None:
            self.model = write_tiny_model(directory / "model", vocab=16_000, context_length=131_072)
            self._command = [sys.executable, "-m", "benchmarks.sse_load"]
        else:
            self.model = yardstick / "model"
            self._command = [str(yardstick / "venv" / "bin" / "python"), str(yardstick / "loadgen.py")]
        self._seeds = count(1)

    def run(
        self, stack: RunningStack, streams: int, requests: int, *flags: str
    ) -> tuple[GeneratorReport, dict[str, Cost]]:
        """Send `requests` requests, `streams` at once; return the report and the cost of each kind of process.

        A cost is the CPU time from the first request to the last answer, and the memory at the end. Prompts are new in
        each run. `flags` are passed to the generator. Raises SystemExit.
        """
        asked = {
            "--port": stack.port,
            "--model": NAME,
            "--tokenizer": self.model / "tokenizer.json",
            "-c": streams,
            "-n": requests,
            "--warmup": 0,
            "--isl": INPUT_TOKENS,
            "--osl": OUTPUT_TOKENS,
            "--seed": next(self._seeds),
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
                timeout=2 * LOAD_LIMIT_S,
                check=False,
            )
        finally:
            os.close(writing)
            watch.join()
        try:
            load = msgspec.json.decode(done.stdout, type=GeneratorReport)
        except msgspec.DecodeError:  # it failed, or no stream ended well and its figures are null
            raise SystemExit(f"the load generator: {done.stdout}{done.stderr[-2000:]}") from None
        before, after = marks["start"], marks["stop"]
        return load, {kind: Cost(cost.cpu_s - before[kind].cpu_s, cost.rss_mb) for kind, cost in after.items()}


def _watch(reading: int, stack: RunningStack, marks: dict[str, dict[str, Cost]]) -> None:
    """Read the stack's cost when the load generator writes start and stop."""
    with os.fdopen(reading) as lines:
        for line in lines:
            marks[line.strip()] = stack.costs()
