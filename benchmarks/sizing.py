"""What `headrace profile` and a simulated fleet predict, against two real workers under the same requests.

    profile of a worker, alone and next to another ─▶ virtual fleet of two ─▶ predicted ──┐
                                                        └─▶ 0.5 and 0.8 of its capacity   ├─▶ table, goals
                                           `up` with two workers ◀─ replay ─▶ measured ───┘

    python -m benchmarks.sizing [--quick] [--json] [--profile FILE] [--minutes M] [--loads 0.5,0.8] [--longest N]
                                [--most N] [--prompt-tokens N] [--output-tokens N] [--step-s S] [-- FLAGS of up]

The capacity is what the virtual fleet does of requests that all come at once. Prompts are tokens, made of the names of
their blocks, so that equal names are cached; all share a quarter of a mean prompt. Without FLAGS the workers are
native ones with the bundled model on the CPU. --quick: half a minute a load, and two minutes of the profile. Run it on
a quiet machine: a loop of Python is timed every two seconds, and each row says how fast the machine was under the load,
of how fast it was during the profile. If others share the machine, that ratio says how much of a miss is the machine's.

An 8B shape on GPUs; with one GPU both workers share it:

    python -m benchmarks.gpu.model DIRECTORY
    python -m benchmarks.sizing --longest 2048 --most 64 --prompt-tokens 1024 --output-tokens 128 --step-s 0.1
                                -- --device cuda --model DIRECTORY
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.report import Goal, report
from deploy.local.size.files import read_profile
from deploy.local.size.profile_file import Profile
from deploy.local.size.started_up import command, running_up
from deploy.local.size.token_client import TimedAnswer, TokenClient, token_client
from deploy.local.size.traffic import MADE_BLOCK, Lengths, Traffic, TrafficRow, drawn_traffic
from deploy.local.terminal import Terminal
from services.virtual.run import percentiles, run
from shared.errors import ConfigError
from shared.messages.virtual import Percentiles, VirtualResult, VirtualRun

WORKERS = 2
FLEET = ("--workers", str(WORKERS), "--frontends", "1", "--routers", "1", "--kvbm-bytes", "0")
LENGTHS = Lengths(rate=1.0, requests=2, prompt=192, output=32, spread=0.5, shared=64, seed=1)
GOALS = {"ttft_p50": 0.10, "ttft_p90": 0.20, "itl_p50": 0.10, "tokens_per_s": 0.05}
"""The most by which each prediction may be off, as a share of what was measured."""
ALL_AT_ONCE = 1000.0
"""A rate that keeps all workers busy, in requests a second."""
CAPACITY_REQUESTS = 1000
"""Enough that beginning and end, in which workers are not full, count little."""
_LATE_LIMIT_S = 600.0
_YARDSTICK_TURNS, _YARDSTICK_EVERY_S = 50_000, 2.0


class SizingRow(Struct, frozen=True):
    """One figure of one load."""

    load: float
    """The rate as a share of the capacity."""
    requests: int
    rate: float
    figure: str
    predicted: float
    measured: float
    off: float
    """The predicted figure divided by the measured one, less 1."""
    speed: float | None = None
    """How fast the machine was, of how fast it was during the profile. None if the profile is an earlier run's."""


@contextmanager
def machine_speeds() -> Iterator[list[float]]:
    """Yield a list that gets the turns of a loop that a core makes in a second of its time, again and again until the
    block ends. Work of others on the machine's cores makes them fewer."""
    turns_per_s, over = list[float](), threading.Event()

    def time_loops() -> None:
        while not over.wait(_YARDSTICK_EVERY_S):
            began_s = time.thread_time()
            for _ in range(_YARDSTICK_TURNS):
                pass
            turns_per_s.append(_YARDSTICK_TURNS / (time.thread_time() - began_s))

    thread = threading.Thread(name="machine-speeds", target=time_loops, daemon=True)
    thread.start()
    try:
        yield turns_per_s
    finally:
        over.set()
        thread.join()


def traffic_of(rate: float, requests: int, lengths: Lengths = LENGTHS) -> Traffic:
    """Return the requests of a load."""
    return drawn_traffic(msgspec.structs.replace(lengths, rate=rate, requests=max(2, requests)))


def predicted(traffic: Traffic, profile: Profile, file: Path, folder: Path, step_s: float) -> VirtualResult:
    """Run the requests through a virtual fleet with the measured times, and steps of at most `step_s`."""
    load = folder / f"{time.monotonic_ns()}.jsonl"
    load.write_bytes(traffic.lines())
    return run(
        VirtualRun(
            trace=str(load),
            block_size=traffic.block_size,
            times=str(file),
            workers=WORKERS,
            machine_workers=profile.subject.workers,
            step_s=step_s,
            overhead_s=profile.overhead_s,
            kv_tokens=profile.kv_tokens,
        )
    )


def prompt_of(row: TrafficRow, asked: TokenClient, load: str) -> list[int]:
    """Return a prompt's tokens, which follow from the names of its blocks. No two loads have tokens in common."""
    tokens = [token for name in row.hash_ids for token in asked.prompt(f"{load} {name}", MADE_BLOCK)]
    return tokens[: row.input_length]


async def replayed(traffic: Traffic, url: str, model: str) -> tuple[list[TimedAnswer], float]:
    """Send the requests at their times; return the answers, and the seconds from the first to the last end."""
    async with token_client(url, model, "") as asked:
        await asked.learn_ids()
        for worker in range(4 * WORKERS):  # each has been asked before
            await asked.ask(asked.prompt(f"warm-up {worker}", 2 * MADE_BLOCK), 8)
        prompts = [prompt_of(row, asked, f"{traffic.rate}") for row in traffic.rows]
        began_s = time.perf_counter()

        async def one(row: TrafficRow, prompt: Sequence[int]) -> TimedAnswer:
            await asyncio.sleep(began_s + row.timestamp / 1000 - time.perf_counter())
            return await asked.ask(prompt, row.output_length)

        async with asyncio.timeout(traffic.rows[-1].timestamp / 1000 + _LATE_LIMIT_S):
            answers = await asyncio.gather(*map(one, traffic.rows, prompts))
        return answers, time.perf_counter() - began_s


def rows_of(
    load: float, traffic: Traffic, planned: VirtualResult, seen: Measurement, speed: float | None = None
) -> list[SizingRow]:
    """Return a row for each figure."""
    pairs = {
        **{f"ttft_{share}": (getattr(planned.ttft_s, share), getattr(seen.ttft_s, share)) for share in _SHARES},
        **{f"itl_{share}": (getattr(planned.itl_s, share), getattr(seen.itl_s, share)) for share in _SHARES},
        "tokens_per_s": (planned.output_tokens_per_s, seen.tokens_per_s),
    }
    return [
        SizingRow(load, len(traffic.rows), traffic.rate, name, guess, found, guess / max(found, 1e-9) - 1, speed)
        for name, (guess, found) in pairs.items()
    ]


_SHARES = ("p50", "p90", "p99")


class Measurement(Struct, frozen=True):
    """What was measured of a load."""

    ttft_s: Percentiles
    itl_s: Percentiles
    tokens_per_s: float


def measurement_of(answers: Sequence[TimedAnswer], seconds: float) -> Measurement:
    """Sum up the answers of one load."""
    return Measurement(
        percentiles([answer.first_s - answer.sent_s for answer in answers]),
        percentiles([gap for answer in answers for gap in answer.gaps_s]),
        sum(answer.tokens for answer in answers) / seconds,
    )


def make_profile(file: Path, words: Sequence[str], flags: argparse.Namespace) -> None:
    """Run `headrace profile`; a file that is there already goes on."""
    sizes = ("--longest", str(flags.longest), "--most", str(flags.most), "--workers", str(WORKERS))
    limit_s = flags.limit_s or (120 if flags.quick else 1800)
    more = (*sizes, "--limit-s", str(limit_s), "--out", str(file))
    subprocess.run(command("profile", *more, "--", *words), stdout=sys.stderr, check=False)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="half a minute a load, two minutes of the profile")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--profile", type=Path, help="a profile to use, or to make")
    parser.add_argument("--limit-s", type=float, help="most seconds of the profile's sweep (1800)")
    parser.add_argument("--longest", type=int, default=512, help="the profile's longest prompt, in tokens")
    parser.add_argument("--most", type=int, default=8, help="the profile's most answers at once")
    parser.add_argument("--minutes", type=float, help="minutes of each load (10)")
    parser.add_argument("--loads", default="0.5,0.8", help="shares of the capacity")
    parser.add_argument("--prompt-tokens", type=int, default=LENGTHS.prompt, help="mean tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=LENGTHS.output, help="mean tokens of an answer")
    parser.add_argument("--step-s", type=float, default=0.25, help="most seconds of a step with parts of prompts")
    parser.add_argument("up", nargs="*", help="flags of up, after --")
    return parser.parse_args()


def main() -> None:
    """Profile, predict, replay and compare."""
    flags = _flags()
    words = flags.up or ["--engine", "native"]
    minutes = flags.minutes or (0.5 if flags.quick else 10.0)
    shared = flags.prompt_tokens // 4 // MADE_BLOCK * MADE_BLOCK or LENGTHS.shared
    lengths = msgspec.structs.replace(LENGTHS, prompt=flags.prompt_tokens, output=flags.output_tokens, shared=shared)
    terminal, rows = Terminal(), list[SizingRow]()
    with tempfile.TemporaryDirectory(prefix="headrace-sizing-") as home:
        folder = Path(home)
        file = (flags.profile or folder / "profile.json").absolute()
        before = list[float]()
        if not file.exists():
            with machine_speeds() as before:
                make_profile(file, words, flags)
        try:
            profile = read_profile(file)
        except ConfigError as wrong:
            sys.exit(str(wrong))
        at_once = traffic_of(ALL_AT_ONCE, CAPACITY_REQUESTS, lengths)
        capacity = predicted(at_once, profile, file, folder, flags.step_s).requests_per_s
        terminal.notice(f"capacity {capacity:.2f} requests a second, overhead {1000 * profile.overhead_s:.1f} ms")
        step = ("--set", f"worker.step_s={flags.step_s}")
        with running_up((*FLEET, *step, *words), terminal, "this comparison") as (url, _):
            for load in (float(text) for text in flags.loads.split(",")):
                traffic = traffic_of(load * capacity, int(load * capacity * 60 * minutes), lengths)
                planned = predicted(traffic, profile, file, folder, flags.step_s)
                with machine_speeds() as speeds, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    answers, seconds = runner.run(replayed(traffic, url, profile.subject.model))
                speed = median(speeds) / median(before) if before and speeds else None
                found = rows_of(load, traffic, planned, measurement_of(answers, seconds), speed)
                rows += found
                for row in found:
                    print(_shown(row), file=sys.stderr if flags.json else sys.stdout, flush=True)
    goals = [
        Goal(f"{row.figure} at {row.load:g}, off by", abs(row.off), "share", goal, abs(row.off) <= goal)
        for row in rows
        if (goal := GOALS.get(row.figure)) is not None
    ]
    if flags.json:
        made = report("sizing", sys.argv[1:], goals, rows)
        print(json.dumps(msgspec.to_builtins(made), indent=1))


def _shown(row: SizingRow) -> str:
    met = {True: "met", False: "missed"}.get(abs(row.off) <= GOALS[row.figure], "") if row.figure in GOALS else ""
    scale, unit = (1, "") if row.figure == "tokens_per_s" else (1000, " ms")
    return (
        f"load {row.load:g} ({row.rate:.2f}/s, {row.requests} requests)  {row.figure:13} predicted "
        f"{row.predicted * scale:9.1f}{unit}  measured {row.measured * scale:9.1f}{unit}  {row.off:+.0%}  {met}"
        + ("" if row.speed is None else f"  machine at {row.speed:.0%}")
    )


if __name__ == "__main__":
    main()
