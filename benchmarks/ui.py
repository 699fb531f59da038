"""What does a page that is open at /ui cost its frontend?

A stack of simulated workers, two routers and a block store. In turn no page is open, and one is: a client that reads
its stream of snapshots. Each time the frontend's CPU time is read from /proc. The difference is the page's price, with
what NATS makes the frontend do for it; it is a share of a core.

What could mislead: an idle process wakes for timers anyway, so the difference of two small numbers is noisy; each turn
is shown. The routers', kvbm's and NATS's work for the page is not the frontend's and is shown by itself. Rendering
takes place in the browser and is not measured.

    python -m benchmarks.ui [--turns 6] [--seconds 20] [--workers 4] [--streams 0] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import aiohttp
from msgspec import Struct, to_builtins

from benchmarks.report import Goal, report
from tests.integration.stack import Up, running
from tests.tiny_model import write_tiny_model

GOAL_SHARE = 0.01
"""Most of a core that one page may take."""
OTHERS = ("router-0", "router-1", "kvbm", "nats")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Turn(Struct, frozen=True):
    """One turn without and with a page; shares of a core."""

    without: float
    with_page: float
    others_without: float
    others_with_page: float


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


async def read_page(url: str) -> None:
    """Be an open page."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http, http.get(f"{url}/ui/events") as page:
        assert page.status == 200, await page.text()
        async for _ in page.content.iter_any():
            pass


async def ask(url: str) -> None:
    """Be a client with one stream after another."""
    body = {
        **{"model": "tiny", "stream": True, "ignore_eos": True, "max_tokens": 300},
        "messages": [{"role": "user", "content": "How does water get from the river to the mill? " * 8}],
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http:
        while True:
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()


async def measure(up: Up, turns: int, seconds: float, streams: int) -> list[Turn]:
    """Return the turns."""
    url, frontend = up.url.removesuffix("/v1"), up.pid("frontend")
    others = [up.pid(name) for name in OTHERS]

    async def shares() -> tuple[float, float]:
        own, rest = cpu_s(frontend), sum(map(cpu_s, others))
        await asyncio.sleep(seconds)
        return (cpu_s(frontend) - own) / seconds, (sum(map(cpu_s, others)) - rest) / seconds

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(url)) for _ in range(streams)]
        await asyncio.sleep(3)
        found: list[Turn] = []
        for _ in range(turns):
            without = await shares()
            page = tasks.create_task(read_page(url))
            await asyncio.sleep(1)
            with_page = await shares()
            page.cancel()
            with suppress(asyncio.CancelledError):
                await page
            await asyncio.sleep(1)
            found.append(Turn(without[0], with_page[0], without[1], with_page[1]))
        for each in asking:
            each.cancel()
    return found


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=0, help="streams that run at the same time")
    parser.add_argument("--quick", action="store_true", help="two turns of five seconds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    turns, seconds = (2, 5.0) if flags.quick else (flags.turns, flags.seconds)
    with tempfile.TemporaryDirectory() as name:
        model = str(write_tiny_model(Path(name) / "tiny"))
        fleet = ("--engine", "simulated", "--workers", str(flags.workers), "--model", model, "--kvbm-bytes", "64M")
        with running(Path(name), *fleet, "--frontends", "1", "--routers", "2") as up:
            found = asyncio.run(measure(up, turns, seconds, flags.streams))
    price = statistics.median(turn.with_page - turn.without for turn in found)
    if flags.json:
        goal = Goal("one page, share of a core", price, "", GOAL_SHARE, price <= GOAL_SHARE)
        print(json.dumps(to_builtins(report("ui", sys.argv[1:], [goal], found)), indent=2))
        return 0
    print(f"{'frontend':>18} {'with a page':>12} {'others':>8} {'with a page':>12}   % of a core")
    for turn in found:
        shown = (turn.without, turn.with_page, turn.others_without, turn.others_with_page)
        print("{:18.2f} {:12.2f} {:8.2f} {:12.2f}".format(*(100 * share for share in shown)))
    print(f"median price of a page: {100 * price:.2f} % of a core (goal: {100 * GOAL_SHARE:.0f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
