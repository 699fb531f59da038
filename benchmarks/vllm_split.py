"""Two vLLM workers with roles against two without: answers that stream while long prompts are computed.

    aggregated   clients ──▶ Headrace ──▶ two workers, each of which computes prompts and decodes
    split        clients ──▶ Headrace ──▶ one worker that computes prompts, one that decodes, and their kvbm

All four engines have the same arguments and run during the whole benchmark; the sides are loaded in turn. Four clients
stream answers one after another. Once all of them have tokens, `--prompts` long prompts are asked one after another,
each of its own tokens. Counted are the gaps between the events of the four streams from the first long prompt's request
to the last one's end, and the time until each long prompt's first token.

    python -m benchmarks.vllm_split --model DIR [--quick] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.report import ROOT, Goal
from benchmarks.vllm import NAME, run, started

SIDES = {"aggregated": ("--workers", "2"), "split": ("--prefill", "1", "--decode", "1")}
PORTS = {"aggregated": 18121, "split": 18122}
TIMEOUT_S = 600.0
FIRST_ID = 100
"""Token ids below may be special ones."""
SHORT = 32
"""Tokens of a stream's own prompt."""
LONG_ANSWER = 8
"""Tokens of a long prompt's answer; one alone is not handed over."""


async def events(
    session: aiohttp.ClientSession, port: int, model: str, prompt: Sequence[int], osl: int
) -> AsyncGenerator[float]:
    """Ask for an answer, and yield the time of each event with text."""
    body = {"model": model, "prompt": prompt, "max_tokens": osl, "temperature": 0, "ignore_eos": True, "stream": True}
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"port {port}: {answer.status} {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                if "error" in json.loads(line[6:]):
                    raise SystemExit(f"port {port}: {line.decode()}")
                yield time.perf_counter()


class Load:
    """One round of one side."""

    def __init__(self, port: int, seed: int, flags: argparse.Namespace, model: str = NAME) -> None:
        self._port, self._random, self._flags, self._model = port, Random(seed), flags, model
        self._streams: list[list[float]] = []
        """The times of the events of each stream."""
        self._ended = asyncio.Event()

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, 8000) for _ in range(count)]

    def _events(self, session: aiohttp.ClientSession, tokens: int, osl: int) -> AsyncGenerator[float]:
        return events(session, self._port, self._model, self._draw(tokens), osl)

    async def _client(self, session: aiohttp.ClientSession, started: asyncio.Event) -> None:
        """Stream one answer after another until the round ends."""
        while not self._ended.is_set():
            times: list[float] = []
            self._streams.append(times)
            async with aclosing(self._events(session, SHORT, self._flags.osl)) as answer:
                async for now_s in answer:
                    times.append(now_s)
                    started.set()
                    if self._ended.is_set():
                        break

    async def run(self) -> dict[str, float]:
        """Return what was measured, in milliseconds."""
        firsts: list[float] = []
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
            asyncio.TaskGroup() as clients,
        ):
            all_started = [asyncio.Event() for _ in range(self._flags.streams)]
            for each in all_started:
                clients.create_task(self._client(session, each))
            for each in all_started:
                await each.wait()
            begun_s = time.perf_counter()
            for _ in range(self._flags.prompts):
                asked_s = time.perf_counter()
                times = [at async for at in self._events(session, self._flags.isl, LONG_ANSWER)]
                firsts.append(times[0] - asked_s)
            ended_s = time.perf_counter()
            self._ended.set()
        gaps = gaps_within(self._streams, begun_s, ended_s)
        return {
            "gap_p50_ms": 1e3 * statistics.median(gaps),
            "gap_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
            "gap_longest_ms": 1e3 * gaps[-1],
            "events_s": len(gaps) / (ended_s - begun_s),
            "long_first_token_ms": 1e3 * statistics.median(firsts),
        }


def gaps_within(streams: Sequence[Sequence[float]], begun_s: float, ended_s: float) -> list[float]:
    """Return the seconds between neighbouring events of each stream, sorted: those gaps that were not over before
    `begun_s`, and had begun before `ended_s`."""
    gaps = (pair for times in streams for pair in pairwise(times))
    return sorted(after - before for before, after in gaps if after > begun_s and before < ended_s)


def hand_overs(port: int) -> float:
    """Return how many requests a frontend has had handed over."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("headrace_hand_overs_total"))


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each side: medians over the rounds."""
    model = Path(flags.model).resolve()
    with tempfile.TemporaryDirectory(prefix="bench-vllm-split-") as folder, ExitStack() as stack:
        for side, roles in SIDES.items():
            command = [str(ROOT / "headrace"), "up", "--engine", "vllm", *roles, "--model", str(model)]
            command += ["--model-name", NAME, "--port", str(PORTS[side]), "--state", f"{folder}/{side}"]
            command += ["--frontends", "1", "--routers", "1", "--kvbm-bytes", "1G"]
            for setting in ("worker.threads=1", "worker.max_running=16", "worker.health.idle_s=0"):
                command += ["--set", setting]
            command += ["--set", f"worker.vllm.max_model_len={flags.isl + flags.osl + SHORT}"]
            stack.enter_context(started(command, PORTS[side], Path(folder, f"{side}.log"), "/health"))
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(flags.rounds):
            for side in sorted(SIDES, reverse=bool(number % 2)):
                before = hand_overs(PORTS[side])
                found = asyncio.run(Load(PORTS[side], 1 + number, flags).run())
                runs[side].append(found | {"hand_overs": hand_overs(PORTS[side]) - before})
    return [row_of(side, found) for side, found in runs.items()]


def row_of(side: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of some runs, and the spread of their p99."""
    medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
    p99s = [round(run["gap_p99_ms"], 1) for run in runs]
    return {"side": side, **medians, "spread": [min(p99s), max(p99s)]}


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goal: much shorter gaps with roles."""
    aggregated, split = rows
    ratio = split["gap_p99_ms"] / aggregated["gap_p99_ms"]
    return [Goal("time between tokens p99, split to aggregated", round(ratio, 3), "times", 0.5, ratio <= 0.5)]


def main() -> int:
    """Run the benchmark. Return 0."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="long prompts of each side and round")
    parser.add_argument("--streams", type=int, default=4, help="streams next to them")
    parser.add_argument("--isl", type=int, default=1024, help="tokens of a long prompt")
    parser.add_argument("--osl", type=int, default=512, help="tokens of a stream's answer")
    return run("vllm_split", parser, measure, goals_of)


if __name__ == "__main__":
    sys.exit(main())
