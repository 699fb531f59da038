"""Two vLLM workers whose prompts share prefixes: routing by what is cached against taking turns.

    kv            clients ──▶ Headrace, policy kv ───────────▶ two vLLM
    round-robin   clients ──▶ Headrace, policy round-robin ──▶ two vLLM
    bare          clients take turns ────────────────────────▶ two `vllm serve`

All six engines have the same arguments and run during the whole benchmark; the sides are loaded in turn. A prompt is
the prefix of one of `--groups` groups, 90 % of its tokens, and a rest of its own. The cache of one engine holds about
half of the prefixes, so that two engines hold all of them only if each keeps to its own. Each round has prefixes of its
own, and begins with one prompt of each group, which is not counted.

The bare side has no proxy: its clients take turns by themselves, which is what a proxy without costs would do.

With --route there are two engines only, the `vllm serve` of the bare side, whose caches are emptied before each turn:

    kv            clients ──▶ `headrace route`, policy kv ───────────▶ the two `vllm serve`
    round-robin   clients ──▶ `headrace route`, policy round-robin ──▶ the same
    bare          clients take turns ────────────────────────────────▶ the same

    python -m benchmarks.vllm_fleet --model DIR [--route] [--quick] [--rounds 3] [--json]
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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
EVENTS = {18114: (18116, 18117), 18115: (18118, 18119)}
"""Port of a `vllm serve` → those of its KV events and of their replay."""
LIMIT_S = 120.0
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


def _up(policy: str, model: Path, folder: str, blocks: int, own: Mapping[str, str]) -> list[str]:
    """Return the command of a stack with two engines of its own."""
    ours = [str(ROOT / "headrace"), "up", "--engine", "vllm", "--workers", "2", "--model", str(model)]
    ours += ["--set", "worker.threads=1", "--set", f"worker.block_size={BLOCK}"]
    ours += ["--set", f"worker.capacity_blocks={blocks}", "--set", "worker.max_running=16"]
    ours += [w for name in ("dtype", "max_model_len") for w in ("--set", f"worker.vllm.{name}={own[name]}")]
    return ours + _shared(policy, folder)


def _route(policy: str, folder: str) -> list[str]:
    """Return the command of a stack in front of the servers of the bare side."""
    urls = [f"http://127.0.0.1:{port}" for port in PORTS["bare"]]
    patient = ["--set", "worker.attached.limit_s=60", "--set", "worker.health.limit_s=300"]
    return [str(ROOT / "headrace"), "route", *urls, *patient, *_shared(policy, folder)]


def _shared(policy: str, folder: str) -> list[str]:
    flags = ["--model-name", NAME, "--port", str(PORTS[policy][0]), "--state", f"{folder}/{policy}"]
    return [*flags, "--frontends", "1", "--routers", "1", "--policy", policy, "--set", "frontend.limits.wait_s=0"]


def _serve(port: int, model: Path, blocks: int, own: Mapping[str, str], *, events: bool) -> list[str]:
    """Return the command of a `vllm serve`. One with KV events is every side's engine, and starts without compiling."""
    alone = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    alone += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", NAME]
    alone += ["--disable-uvicorn-access-log", "--block-size", str(BLOCK)]
    alone += ["--num-gpu-blocks-override", str(blocks)]
    if events:
        publish, replay = (f"tcp://*:{number}" for number in EVENTS[port])
        found = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": publish, "replay_endpoint": replay}
        alone += ["--enforce-eager", "--kv-events-config", json.dumps(found)]
    return alone + [w for name, value in own.items() for w in (f"--{name.replace('_', '-')}", value)]


def _wait(done: Callable[[], bool], what: str, log: Path) -> None:
    """Wait until it is so. Raise SystemExit, with the end of a log, after LIMIT_S."""
    until_s = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > until_s:
            raise SystemExit(f"not within {LIMIT_S:g} s: {what}; see\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _emptied(port: int) -> bool:
    """Empty the cache of a `vllm serve`. Return False if a request still uses it."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", b"{}")
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        return bool(json.loads(answer.read()).get("success"))


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each side: medians over the rounds."""
    model = Path(flags.model).resolve()
    blocks = max(flags.streams * (flags.isl + flags.osl) // BLOCK, flags.groups * flags.isl // BLOCK * 6 // 10)
    own = {"dtype": "float32", "max_model_len": str(flags.isl + flags.osl + BLOCK), "max_num_seqs": "16"}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-fleet-") as folder, ExitStack() as stack:
        for port in PORTS["bare"]:
            log = Path(folder, f"{port}.log")
            command = _serve(port, model, blocks, own, events=flags.route)
            stack.enter_context(started(command, port, log, "/health", {"VLLM_SERVER_DEV_MODE": "1"}))
        for policy in ("kv", "round-robin"):
            log = Path(folder, f"{policy}.log")
            command = _route(policy, folder) if flags.route else _up(policy, model, folder, blocks, own)
            stack.enter_context(started(command, PORTS[policy][0], log, "/health"))
            if flags.route:
                _wait(partial(_both_serve, log), f"{policy} has both servers", log)
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in PORTS}
        for number in range(flags.rounds):
            for side in sorted(PORTS, reverse=bool(number % 2)):
                for port in PORTS["bare"] if flags.route else ():
                    _wait(partial(_emptied, port), f"the cache of {port} is emptied", Path(folder, f"{port}.log"))
                prompts = Prompts(1 + number, flags)
                asyncio.run(_load(PORTS[side], prompts.first(), flags))
                runs[side].append(asyncio.run(_load(PORTS[side], prompts.rest(flags.requests), flags)))
    return [row_of(side, found) for side, found in runs.items()]


def _both_serve(log: Path) -> bool:
    return log.read_text(encoding="utf-8").count(": serves\n") == 2


def row_of(side: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of some runs, and the spread of their tokens a second."""
    medians = {key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}
    rates = [round(run["out_tok_s"], 1) for run in runs]
    return {"side": side, **medians, "spread": [min(rates), max(rates)]}


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: more tokens a second and earlier first tokens than both other sides."""
    return _goals(rows, 1.0, 1.0)


def route_goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals of `headrace route`, which are higher: a proxy has to earn its costs."""
    return _goals(rows, 1.4, 0.5)


def _goals(rows: Sequence[dict[str, Any]], more: float, earlier: float) -> list[Goal]:
    kv, *others = rows
    goals: list[Goal] = []
    for other in others:
        rate, first = kv["out_tok_s"] / other["out_tok_s"], kv["ttft_p50_ms"] / other["ttft_p50_ms"]
        goals += [
            Goal(f"tokens a second, kv to {other['side']}", round(rate, 3), "times", more, rate >= more),
            Goal(f"first token p50, kv to {other['side']}", round(first, 3), "times", earlier, first <= earlier),
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
    parser.add_argument("--route", action="store_true", help="`headrace route` in front of the two `vllm serve`")
    through_route = "--route" in sys.argv[1:]
    return run("vllm_fleet", parser, measure, route_goals_of if through_route else goals_of)


if __name__ == "__main__":
    sys.exit(main())
