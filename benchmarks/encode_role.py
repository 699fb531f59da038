"""Does a worker that only encodes images keep the gaps between tokens short?

Two `up`s with two native workers each on the CPU, and a LLaVA of random weights, whose tower is CLIP's ViT-B/16 in
float32: in one both workers do all, in the other one answers and the other one encodes. STREAMS answers are decoded all
the time, and new pictures come at a steady rate, each with a question of its own. The two take turns; only one has load
at a time.

    gap         seconds between two tokens of a stream; p50, p99 and the longest, over all streams
    answer      seconds of a request with a picture, to the end of its short answer
    apart       pictures that the encode worker has encoded

What could mislead: an engine has one thread here, so a step with a picture takes as long as on a machine with few
cores. Where both workers answer, each has half of the streams; where one does, it has all, and its steps are a little
longer. The pictures' tokens are a prompt, which one of the two workers has to compute in both cases.

    python -m benchmarks.encode_role [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.images import ANSWER_LIMIT_S, PATIENT, SIDE, TOWER, Fleet, picture
from benchmarks.report import Goal, print_report
from deploy.local.size.started_up import running_up
from deploy.local.terminal import Terminal
from shared.errors import Unavailable
from tests.tiny_model import CLIP, write_tiny_model

STREAMS = 4
ROUNDS, ROUND_S = 4, 30.0
QUICK_ROUNDS, QUICK_S = 2, 15.0
EVERY_S = 1.5
"""Seconds between two pictures."""
SETTLE_S = 3.0
"""Seconds of load before anything is counted in a turn."""
ANSWER_TOKENS, STREAM_TOKENS = 4, 1500
DECODER: dict[str, Any] = {
    **{"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 2048},
    "context_length": 4096,
}
"""A step takes some 20 ms: a stall is more than one of a hundred gaps."""
COMMON = ("--engine", "native", "--frontends", "1", "--routers", "1", "--kvbm-bytes", "512MiB")
WAYS = {
    "in place": (
        *("--workers", "2", "--set", "worker.kvbm.embeddings=true", "--set", "kvbm.pool.arenas=2"),
        *("--set", "worker.threads=1"),
    ),
    "encode role": ("--workers", "1", "--encode", "1", "--set", "worker.threads=1"),
}
GOAL = 0.6
_PICTURES = count(5000)
Row = dict[str, Any]


class Load:
    """The load of one turn at one `up`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, fleet: Fleet) -> None:
        self._http = http
        self._url = url.removesuffix("/v1")
        self._fleet = fleet
        self._counts_from_s = time.perf_counter() + SETTLE_S
        self.gaps: list[float] = []
        self.answers: list[float] = []

    async def run(self, seconds: float) -> None:
        """Load it for this long, and wait for the answers that are due."""
        until_s = self._counts_from_s + seconds
        streams = [asyncio.create_task(self._stream(number, until_s)) for number in range(STREAMS)]
        asking: list[asyncio.Task[None]] = []
        while time.perf_counter() < until_s:
            asking.append(asyncio.create_task(self._ask(next(_PICTURES))))
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*asking, *streams)

    async def _ask(self, number: int) -> None:
        part = {"type": "image_url", "image_url": {"url": picture(number)}}
        content = [{"type": "text", "text": f"Picture {number}?"}, part]
        began_s = time.perf_counter()
        took_s = await self._fleet.ask([{"role": "user", "content": content}], max_tokens=ANSWER_TOKENS)
        if began_s >= self._counts_from_s:
            self.answers.append(took_s)

    async def _stream(self, number: int, until_s: float) -> None:
        body: dict[str, Any] = {
            **{"messages": [{"role": "user", "content": f"Stream {number} tells."}], "max_tokens": STREAM_TOKENS},
            **{"temperature": 0, "stream": True, "ignore_eos": True},
        }
        while time.perf_counter() < until_s:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise Unavailable(f"status {response.status}: {await response.text()}")
                last_s = 0.0
                async for line in response.content:
                    now_s = time.perf_counter()
                    if now_s >= until_s:
                        break
                    if line.startswith(b"data: {"):
                        if last_s >= self._counts_from_s:
                            self.gaps.append(now_s - last_s)
                        last_s = now_s


async def measure(ups: dict[str, tuple[str, Path]], rounds: int, seconds: float) -> list[Row]:
    """Load the `up`s in turns. Return a row of each."""
    rows: dict[str, Row] = {way: {"way": way, "p99_s_of_rounds": []} for way in ups}
    gaps: dict[str, list[float]] = {way: [] for way in ups}
    answers: dict[str, list[float]] = {way: [] for way in ups}
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        fleets = {way: Fleet(http, url, state) for way, (url, state) in ups.items()}
        for _ in range(rounds):
            for way, (url, _state) in ups.items():
                load = Load(http, url, fleets[way])
                await load.run(seconds)
                gaps[way] += load.gaps
                answers[way] += load.answers
                rows[way]["p99_s_of_rounds"].append(float(np.percentile(load.gaps, 99)))
        for way, row in rows.items():
            row |= {"gaps": len(gaps[way]), "gap_p50_s": statistics.median(gaps[way])}
            row |= {"gap_p99_s": float(np.percentile(gaps[way], 99)), "gap_max_s": max(gaps[way])}
            row |= {"pictures": len(answers[way]), "answer_p50_s": statistics.median(answers[way])}
            row |= await fleets[way].images()
    return list(rows.values())


def main() -> None:
    """Measure both ways in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of {QUICK_S:g} s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args()
    rounds, seconds = (QUICK_ROUNDS, QUICK_S) if flags.quick else (ROUNDS, ROUND_S)
    terminal = Terminal()
    with tempfile.TemporaryDirectory(prefix="headrace-encode-") as home, ExitStack() as opened:
        model = write_tiny_model(
            Path(home) / "model",
            architecture="LlavaForConditionalGeneration",
            tied=False,
            llava={"vision_config": {**CLIP, **TOWER, "image_size": SIDE}},
            **DECODER,
        )
        ups = {
            way: opened.enter_context(running_up(("--model", str(model), *COMMON, *PATIENT, *words), terminal, way))
            for way, words in WAYS.items()
        }
        rows = asyncio.run(measure(ups, rounds, seconds))
    goals = goals_of(*rows)
    print_report("encode_role", goals, rows, as_json=flags.json)


def goals_of(in_place: Row, apart: Row) -> list[Goal]:
    """Compare the two ways with the goal."""
    ratio = apart["gap_p99_s"] / in_place["gap_p99_s"]
    return [Goal("time between tokens p99, of that in place", ratio, "times", GOAL, ratio <= GOAL)]


if __name__ == "__main__":
    main()
