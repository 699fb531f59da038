"""Two vLLM workers whose prompts share prefixes: routing by what is cached against taking turns.

    kv            clients ──▶ Headrace, policy kv ───────────▶ two vLLM
    round-robin   clients ──▶ Headrace, policy round-robin ──▶ two vLLM
    bare          clients take turns ────────────────────────▶ two `vllm serve`

All six engines have the same arguments and run during the whole benchmark; the sides are loaded in turn. A prompt is
the prefix of one of `--groups` groups, 90 % of its tokens, and a rest of its own. The cache of one engine holds about
half of the prefixes, so that two engines hold all of them only if each keeps to its own. Each round has prefixes of its
own, and begins with one prompt of each group, which is not counted.

The bare side has no proxy: its clients take turns by themselves, which is what a proxy without costs would do.

    python -m benchmarks.vllm_fleet --model DIR [--quick] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.report import ROOT, Goal
from benchmarks.vllm import NAME, PYTHON, run, started

BLOCK = 32
"""Tokens of a block: the least that vLLM takes on a CPU."""
SHARED = 0.9
TIMEOUT_S = 600.0
PORTS = {"kv": (18112,), "round-robin": (18113,), "bare": (18114, 18115)}
FIRST_ID = 100
"""Token ids below may be special ones."""


class Prompts:
    """The prompts of one round."""

    def __init__(self, seed: int, flags: argparse.Namespace) -> None:
        self._random = Random(seed)
        self._own = flags.isl - int(flags.isl * SHARED)
        self._prefixes = [self._draw(int(flags.isl * SHARED)) for _ in range(flags.groups)]

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, 8000) for _ in range(count)]

    def first(self) -> list[list[int]]:
        """Return one prompt of each group."""
        return [prefix + self._draw(self._own) for prefix in self._prefixes]

    def rest(self, count: int) -> list[list[int]]:
        """Return prompts of groups in random order."""
        return [self._random.choice(self._prefixes) + self._draw(self._own) for _ in range(count)]


async def _stream(
    session: aiohttp.ClientSession, port: int, prompt: Sequence[int], osl: int
) -> tuple[float, float, int]:
    """Return the seconds until the first token and until the end, and the number of events with text."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": osl, "temperature": 0, "ignore_eos": True, "stream": True}
    begun_s, first_s, events = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"port {port}: {answer.status} {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                if "error" in found:
                    raise SystemExit(f"port {port}: {found}")
                first_s = first_s or time.perf_counter() - begun_s
                events += 1
    return first_s, time.perf_counter() - begun_s, events


async def _load(ports: Sequence[int], prompts: Sequence[list[int]], flags: argparse.Namespace) -> dict[str, float]:
    """Send all prompts, `flags.streams` at a time; return tokens a second and first tokens."""
    turns: Iterator[tuple[int, list[int]]] = zip(cycle(ports), prompts, strict=False)
    found: list[tuple[float, float, int]] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def client() -> None:
            for port, prompt in turns:
                found.append(await _stream(session, port, prompt, flags.osl))

        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(flags.streams):
                clients.create_task(client())
        elapsed_s = time.perf_counter() - begun_s
    firsts = sorted(first_s for first_s, _, _ in found)
    return {
        "out_tok_s": len(found) * flags.osl / elapsed_s,
        "ttft_p50_ms": statistics.median(firsts) * 1e3,
        "ttft_p90_ms": firsts[int(0.9 * (len(firsts) - 1))] * 1e3,
    }


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each side: medians over the rounds."""
    model = Path(flags.model).resolve()
    blocks = max(flags.streams * (flags.isl + flags.osl) // BLOCK, flags.groups * flags.isl // BLOCK * 6 // 10)
    own = {"dtype": "float32", "max_model_len": str(flags.isl + flags.osl + BLOCK), "max_num_seqs": "16"}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-fleet-") as folder, ExitStack() as stack:
        for policy in ("kv", "round-robin"):
            ours = [str(ROOT / "headrace"), "up", "--engine", "vllm", "--workers", "2", "--model", str(model)]
            ours += ["--model-name", NAME, "--port", str(PORTS[policy][0]), "--state", f"{folder}/{policy}"]
            ours += ["--frontends", "1", "--routers", "1", "--policy", policy, "--set", "worker.threads=1"]
            ours += ["--set", "frontend.limits.wait_s=0", "--set", f"worker.block_size={BLOCK}"]
            ours += ["--set", f"worker.capacity_blocks={blocks}", "--set", "worker.max_running=16"]
            ours += [w for name in ("dtype", "max_model_len") for w in ("--set", f"worker.vllm.{name}={own[name]}")]
            stack.enter_context(started(ours, PORTS[policy][0], Path(folder, f"{policy}.log"), "/health"))
        for port in PORTS["bare"]:
            alone = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            alone += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", NAME]
            alone += ["--disable-uvicorn-access-log", "--block-size", str(BLOCK)]
            alone += ["--num-gpu-blocks-override", str(blocks)]
            alone += [w for name, value in own.items() for w in (f"--{name.replace('_', '-')}", value)]
            stack.enter_context(started(alone, port, Path(folder, f"{port}.log"), "/health"))
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in PORTS}
        for number in range(flags.rounds):
            for side in sorted(PORTS, reverse=bool(number % 2)):
                prompts = Prompts(1 + number, flags)
                asyncio.run(_load(PORTS[side], prompts.first(), flags))
                runs[side].append(asyncio.run(_load(PORTS[side], prompts.rest(flags.requests), flags)))
    return [row_of(side, found) for side, found in runs.items()]


def row_of(side: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of some runs, and the spread of their tokens a second."""
    medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
    rates = [round(run["out_tok_s"], 1) for run in runs]
    return {"side": side, **medians, "spread": [min(rates), max(rates)]}


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: more tokens a second and earlier first tokens than both other sides."""
    kv, *others = rows
    goals: list[Goal] = []
    for other in others:
        rate, first = kv["out_tok_s"] / other["out_tok_s"], kv["ttft_p50_ms"] / other["ttft_p50_ms"]
        goals += [
            Goal(f"tokens a second, kv to {other['side']}", round(rate, 3), "times", 1.0, rate > 1.0),
            Goal(f"first token p50, kv to {other['side']}", round(first, 3), "times", 1.0, first < 1.0),
        ]
    return goals


def main() -> int:
    """Run the benchmark. Return 0."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="counted requests of each side and round")
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--groups", type=int, default=16, help="number of prefixes")
    parser.add_argument("--isl", type=int, default=320, help="tokens of a prompt")
    parser.add_argument("--osl", type=int, default=16, help="tokens of an answer")
    return run("vllm_fleet", parser, measure, goals_of)


if __name__ == "__main__":
    sys.exit(main())
