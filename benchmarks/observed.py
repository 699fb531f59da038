"""What does a token cost while its fleet is watched, divided by what it costs otherwise?

path       the frontend alone, with streams that stay open, as in frontend_path.py: CPU time of its process
serving    all processes of a stack, answers of 128 tokens, as in serving.py: CPU time of all of them

Each case is a stack of its own. All are up at once and take turns, of a second on the path and of some seconds in
serving, each time in another order; a round's figure is a case's CPU time a token divided by that of `off` in the same
round.

off        as shipped: no trace, no lines of successful requests
on         a line for each request, as JSON, and a scrape of every process's /metrics every 5 s, as OpenMetrics
traced     the same, and traces of 1 % of the requests, which a collector takes
before     with --before: the services of another checkout, such as one without all this, by this tree's packages

What could mislead: no request ends on `path`, so that lines and traces cost nothing there. Other programs make caches
cold, which rounds differ by; the spread is shown. The price of an open page is that of benchmarks/ui.py. `before` has
all differences of the two checkouts in it. The collector's own work is not counted, nor is Prometheus's.

    python -m benchmarks.observed [--part path|serving] [--before DIR] [--rounds 12] [--streams 128] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.frontend_load import FrontendProcess, Peers, StreamClient, connect_clients, stack, take_spans
from benchmarks.frontend_path import PROMPT_TOKENS, STEP_S, stream
from benchmarks.report import ROOT, Goal, report
from benchmarks.serving import LIMITS, PACED, refusal
from benchmarks.serving_load import ENDLESS, OUTPUT_TOKENS, Generator
from benchmarks.serving_stacks import RunningStack, ours

BASE = "off"
GOALS = {"on": 1.02, "traced": 1.03}
"""The largest ratio to `off`, by case."""
SHARE = 0.01
"""The share of requests that is traced."""
SCRAPE_S = 5.0
"""The time between two scrapes, as in deploy/compose/prometheus.yml."""
TURN_S, TURNS = 1.0, 5
"""The time of a turn on the path, and the turns of each case in a round; one of them has a scrape."""
PATH_STREAMS = 512
KEEP_S = 1.0
"""The time between two tokens of streams whose turn it is not."""
LEAST_EVENTS_A_TOKEN = 0.95
"""A round of the path with fewer does not count: clients got tokens together, or after their turn."""
ROUNDS_OF_REQUESTS = 3
"""Requests of each stream in a turn of `serving`, one after another."""
SCRAPES = 100
"""Scrapes whose mean is the price of one."""
ACCEPT = "application/openmetrics-text;version=1.0.0"
PARTS = ("path", "serving")


class Turn(Struct, frozen=True):
    """One turn of one case."""

    part: str
    case: str
    round: int
    us_a_token: float
    events_a_token: float
    refused: str = ""
    """Why the turn does not count; empty if it counts."""


class Scrape(Struct, frozen=True):
    """The price of one scrape of all processes of a stack."""

    processes: int
    cpu_ms: float


def settings(case: str, before: Path | None, collector: str) -> dict[str, dict[str, str]]:
    """Return a case's settings of each service, by the names of their environment variables."""
    every: dict[str, str] = {}
    if case == "before":
        every["PYTHONPATH"] = str(before)
    elif case != BASE:
        every["HEADRACE_OBSERVE_LOG_FORMAT"] = "json"
    if case == "traced":
        every |= {"HEADRACE_TRACE_ENDPOINT": collector, "HEADRACE_TRACE_SAMPLE": str(SHARE)}
    line = {"HEADRACE_ACCESS_LOG": "true"} if case in GOALS else {}
    return {"frontend": every | line, "router": every, "worker": every}


def scrape(url: str) -> None:
    """Ask as a Prometheus does that takes exemplars."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        answer.read()


def in_turn(cases: Sequence[str], number: int) -> list[str]:
    """Return the cases, with another one first in each round."""
    first = number % len(cases)
    return [*cases[first:], *cases[:first]]


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process so far, in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


# --- the path


class PathCase:
    """A frontend whose streams are open, and the sums of the round so far."""

    def __init__(self, case: str, frontend: FrontendProcess, peers: Peers, clients: Sequence[StreamClient]) -> None:
        self._case = case
        self._frontend = frontend
        self._peers = peers
        self._clients = clients
        self._ns = self._tokens = self._events = 0

    async def turn(self, *, with_scrape: bool) -> None:
        """Make steps for TURN_S."""
        before = self._now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream(self._peers, STEP_S, TURN_S))
            if with_scrape:
                tasks.create_task(asyncio.to_thread(scrape, f"http://127.0.0.1:{self._frontend.port}"))
        ns, tokens, events = (now - then for now, then in zip(self._now(), before, strict=True))
        self._ns, self._tokens, self._events = self._ns + ns, self._tokens + tokens, self._events + events

    async def keep(self) -> None:
        """Make a step now and then, until cancelled: a stream without tokens would be given up."""
        while True:
            await self._peers.step()
            await asyncio.sleep(KEEP_S)

    def end_round(self, number: int) -> Turn:
        """Return the round's sums, and begin the next round."""
        ended = sum(client.ended for client in self._clients)
        tokens = max(1, self._tokens)
        events = self._events / tokens
        refused = f"{events:.2f} events a token" if events < LEAST_EVENTS_A_TOKEN else ""
        refused = f"{ended} lost" if ended else refused
        turn = Turn("path", self._case, number, self._ns / 1000 / tokens, events, refused)
        self._ns = self._tokens = self._events = 0
        return turn

    def close(self) -> None:
        """End the streams."""
        for client in self._clients:
            if client.transport is not None:
                client.transport.abort()

    def _now(self) -> tuple[int, int, int]:
        return cpu_ns(self._frontend.pid), self._peers.tokens, sum(client.events for client in self._clients)


@asynccontextmanager
async def path_cases(cases: Sequence[str], before: Path | None) -> AsyncIterator[dict[str, PathCase]]:
    """Start a frontend for each case, and its streams."""
    async with AsyncExitStack() as started:
        found: dict[str, PathCase] = {}
        for case in cases:
            tree = before if case == "before" and before is not None else ROOT
            share = SHARE if case == "traced" else None
            added = settings("on", None, "")["frontend"] if case in GOALS else None
            frontend, peers = await started.enter_async_context(stack(trace_share=share, added=added, tree=tree))
            clients = await connect_clients(frontend, PATH_STREAMS, PROMPT_TOKENS)
            await peers.streaming(PATH_STREAMS)
            found[case] = PathCase(case, frontend, peers, clients)
            started.callback(found[case].close)
            await stream(peers, STEP_S, TURN_S)
        yield found


async def path(cases: Sequence[str], before: Path | None, rounds: int) -> list[Turn]:
    """Return the rounds of the path."""
    found: list[Turn] = []
    async with path_cases(cases, before) as started:
        for number in range(rounds):
            for turn in range(TURNS):
                for case in in_turn(cases, number + turn):
                    async with asyncio.TaskGroup() as tasks:
                        kept = [tasks.create_task(one.keep()) for name, one in started.items() if name != case]
                        await started[case].turn(with_scrape=case in GOALS and turn == 0)
                        for task in kept:
                            task.cancel()
            found += [one.end_round(number) for one in started.values()]
    return found


# --- serving


@contextmanager
def collector() -> Iterator[str]:
    """Take spans, in a thread of its own; yield the endpoint."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(take_spans, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@contextmanager
def scraped(urls: Sequence[str]) -> Iterator[None]:
    """Scrape these every SCRAPE_S, the first time after half of that."""
    ended = threading.Event()

    def run() -> None:
        wait_s = SCRAPE_S / 2
        while not ended.wait(wait_s):
            for url in urls:
                scrape(url)
            wait_s = SCRAPE_S

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def serving_turn(generator: Generator, running: RunningStack, case: str, number: int, streams: int) -> Turn:
    """Ask for answers, paced; the streams begin one after another over the time of one request."""
    urls = list(running.observed.values()) if case in GOALS else []
    flags = ("--ramp", str(OUTPUT_TOKENS * STEP_S))
    with scraped(urls) if urls else ExitStack():
        load, spent = generator.run(running, streams, streams * ROUNDS_OF_REQUESTS, *flags)
    us = 1e6 * sum(cost.cpu_s for cost in spent.values()) / (load.n * OUTPUT_TOKENS)
    return Turn("serving", case, number, us, load.ev_per_req / OUTPUT_TOKENS, refusal(load, "unpaced"))


def scrape_ms(running: RunningStack) -> float:
    """Return the CPU time of one scrape of all processes, in ms, one after another while nothing else happens."""
    before = sum(cost.cpu_s for cost in running.costs().values())
    for _ in range(SCRAPES):
        for url in running.observed.values():
            scrape(url)
    return 1000 * (sum(cost.cpu_s for cost in running.costs().values()) - before) / SCRAPES


def serving(cases: Sequence[str], before: Path | None, rounds: int, streams: int) -> list[Turn | Scrape]:
    """Return the turns of serving, and then what a scrape takes."""
    with tempfile.TemporaryDirectory() as name, collector() as endpoint, ExitStack() as started:
        folder = Path(name)
        generator = Generator(None, folder)
        running: dict[str, RunningStack] = {}
        for case in cases:
            added = settings(case, before, endpoint)
            one = ours(generator.model, folder / case, worker=ENDLESS | LIMITS | PACED, added=added)
            running[case] = started.enter_context(one)
            generator.run(running[case], 16, 100)
        turn = partial(serving_turn, generator)
        found: list[Turn | Scrape] = [
            turn(running[case], case, number, streams) for number in range(rounds) for case in in_turn(cases, number)
        ]
        return [*found, Scrape(len(running["on"].observed), scrape_ms(running["on"]))]


# --- results


def ratios(turns: Sequence[Turn], part: str, case: str, base: str = BASE) -> list[float]:
    """Return a case's cost divided by that of `base` in the same round, of each round in which both count."""
    cost = {(turn.case, turn.round): turn.us_a_token for turn in turns if turn.part == part and not turn.refused}
    rounds = sorted({turn.round for turn in turns})
    return [
        cost[case, number] / cost[base, number]
        for number in rounds
        if (case, number) in cost and (base, number) in cost
    ]


def goals(turns: Sequence[Turn], parts: Sequence[str], cases: Sequence[str]) -> list[Goal]:
    """Take medians over the rounds that count; a goal without any is not met."""
    found: list[Goal] = []
    bases: Mapping[str, str] = {"off": BASE} | ({"before": "before"} if "before" in cases else {})
    for part in parts:
        for case, most in GOALS.items():
            for name, base in bases.items():
                every = ratios(turns, part, case, base)
                value = statistics.median(every) if every else None
                met = value is not None and value <= most
                found.append(Goal(f"{part}: CPU a token, {case}, of {name}", value, "times", most, met))
    return found


def line(turns: Sequence[Turn], part: str, case: str) -> str:
    """Return one case as text: medians, with the smallest and the largest ratio."""
    mine = [turn for turn in turns if (turn.part, turn.case) == (part, case)]
    cost, events = (
        statistics.median(getattr(turn, name) for turn in mine) for name in ("us_a_token", "events_a_token")
    )
    every = ratios(turns, part, case)
    shown = f"{statistics.median(every):.3f} ({min(every):.3f} to {max(every):.3f})" if every else "none counts"
    return f"{part:8} {case:8} {cost:7.2f} µs a token, {events:.2f} events each, of {BASE} {shown}"


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--streams", type=int, default=128, help="streams of `serving`")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    parts = [flags.part] if flags.part else list(PARTS)
    before = None if flags.before is None else flags.before.resolve()
    cases = [BASE, *GOALS, *([] if before is None else ["before"])]
    rounds = 2 if flags.quick else flags.rounds
    rows: list[Turn | Scrape] = []
    if "path" in parts:
        rows += uvloop.run(path(cases, before, rounds))
    if "serving" in parts:
        rows += serving(cases, before, rounds, flags.streams)
    turns = [row for row in rows if isinstance(row, Turn)]
    found = goals(turns, parts, cases)
    if flags.json:
        print(msgspec.json.encode(report("observed", sys.argv[1:], found, rows)).decode())
        return 0
    for part in parts:
        for case in cases:
            print(line(turns, part, case))
    for row in rows:
        if isinstance(row, Scrape):
            print(f"a scrape of all {row.processes} processes takes {row.cpu_ms:.1f} ms")
    for goal in found:
        value = "none counts" if goal.value is None else f"{goal.value:.3f} {goal.unit}"
        print(f"{goal.name}: {value} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
