"""What does KV routing bring over round robin, next to what Dynamo's brings, with engines of one timing, in one run?

    ours    kv, round-robin      frontend, router, NATS, etcd, four simulated workers each
    peer    kv, round-robin      Dynamo's frontend with its router inside, NATS, etcd, four of its mockers each

All four fleets are up at once and take turns, in an order that changes by the round. In a round all get the same
requests over HTTP from one client: prompts of 2,048 token ids that begin with one of 40 beginnings of nine tenths of
that, streamed answers of 32 tokens. A worker's cache holds less than half of the beginnings, all caches together twice
as many.

Timing    0.2 ms for each computed token of a prompt and 12 ms for a step's decodes, whatever else is in the step: both
          simulators can do that. Before the rounds each fleet answers lone requests; if their time to the first token,
          or between tokens, differs by more than a tenth between the two systems, the run does not count.

gain      a figure of kv over that of round-robin in the same round, of one system: requests a second, and (the other
          way round) the median time to the first token

Dynamo's kv with its defaults weighs the blocks of running requests as much as those that a prompt finds cached;
`--peer-front=--no-router-track-active-blocks` was its best of four settings on this load.

What could mislead: the simulators schedule on their own (Dynamo's as its engine would); four stacks share the machine,
and those that wait are idle.

    python -m benchmarks.routing_gain --peer DIR [--peer-front=FLAGS] [--rounds 3] [--concurrency 8,24] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.report import Goal, report
from benchmarks.serving_stacks import BLOCK_SIZE, NAME, RunningStack, launched, peer
from deploy.local.bench.flags import bench_options
from deploy.local.bench.measure import measurer
from deploy.local.bench.rows import BenchRow
from deploy.local.stack import servers
from deploy.local.stack.stack import UpOptions
from deploy.local.terminal import Terminal
from deploy.local.usage import BenchFlags

WORKERS = 4
POLICIES = ("kv", "round-robin")
SYSTEMS = ("ours", "peer")
BLOCKS = 2048
"""Blocks of each worker's cache."""
AT_ONCE = 256
"""The most requests that a worker computes at once."""
STEP_TOKENS = 8192
PROMPT, SHARED, BEGINNINGS, ANSWER = 2048, 0.9, 40, 32
REQUESTS = 320
"""Requests of a load: eight for each beginning, the first of which finds it nowhere."""
LONE_REQUESTS = 8
MOST_APART = 0.1
TOKEN_S, DECODE_S = 0.0002, 0.012
FAR = 1 << 20


class Gain(Struct, frozen=True):
    """What kv brings in one system and round."""

    system: str
    load: str
    round: int
    throughput: float
    first_token: float


class Lone(Struct, frozen=True):
    """Medians of one fleet's lone requests."""

    fleet: str
    first_token_s: float
    inter_token_s: float


def our_timing(file: Path) -> None:
    """Write the timing as a table of our simulated engine. No decode is without context; the seconds of such a one keep
    steps with prefills and decodes at the sum of both."""
    prefill = [[tokens, context, tokens * TOKEN_S] for tokens in (1, FAR) for context in (0, FAR)]
    decode = [[batch, context, DECODE_S if context else 1e-9] for batch in (1, FAR) for context in (0, 1, FAR)]
    file.write_bytes(msgspec.json.encode({"prefill": prefill, "decode": decode}))


def peer_timing(file: Path) -> None:
    """Write the same as a profile of Dynamo's mocker, in milliseconds."""
    ends = np.array([1.0, FAR])
    np.savez(
        file,
        prefill_isl=ends,
        prefill_ttft_ms=ends * TOKEN_S * 1e3,
        decode_active_kv_tokens=ends,
        decode_context_length=ends,
        decode_itl=np.full((2, 2), DECODE_S * 1e3),
    )


def our_fleet(policy: str, model: Path, directory: Path) -> AbstractContextManager[RunningStack]:
    """Run our stack with a policy."""
    table = directory / "times.json"
    our_timing(table)
    options = UpOptions(
        model=str(model),
        model_name=NAME,
        port=servers.free_ports(1)[0],
        workers=WORKERS,
        engine="simulated",
        policy=policy,
    )
    worker = {
        "HEADRACE_CAPACITY_BLOCKS": str(BLOCKS),
        "HEADRACE_BLOCK_SIZE": str(BLOCK_SIZE),
        "HEADRACE_MAX_RUNNING": str(AT_ONCE),
        "HEADRACE_STEP_TOKENS": str(STEP_TOKENS),
        "HEADRACE_SIMULATED_TABLE": str(table),
    }
    return launched(options, directory, {"worker": worker})


def peer_fleet(
    policy: str, yardstick: Path, directory: Path, front: Sequence[str]
) -> AbstractContextManager[RunningStack]:
    """Run the yardstick's stack with a policy; `front` are more flags of its frontend with kv."""
    profile = directory / "times.npz"
    peer_timing(profile)
    added = ("--planner-profile-data", str(profile), "--max-num-batched-tokens", str(STEP_TOKENS))
    more = {
        "workers": WORKERS,
        "router": policy,
        "gpu_blocks": BLOCKS,
        "max_num_seqs": AT_ONCE,
        "extra_mock": added,
        "extra_front": () if policy != "kv" else ("--kv-cache-block-size", str(BLOCK_SIZE), *front),
    }
    return peer(yardstick, directory / "run", speedup=1, more=more)


async def measured(fleet: RunningStack, flags: BenchFlags, name: str, number: int) -> list[BenchRow]:
    """Measure the loads of `flags` at a fleet."""
    url = f"http://127.0.0.1:{fleet.port}/v1"
    options = bench_options(replace(flags, seed=number), (), url, "", "")
    rows: list[BenchRow] = []
    async with measurer(url, options, Terminal()) as one:
        for point in options.points:
            await one.run(point, rows, options.key_of(name, number))
    for row in rows:
        if set(row.outcomes) != {"done"} or not row.complete:
            raise SystemExit(f"{row.full_name}: {row.outcomes} {row.reasons}")
    return rows


def lone(name: str, rows: Sequence[BenchRow]) -> Lone:
    """Return a fleet's lone times."""
    first, between = rows[0].first_token_s.p50, rows[0].time_per_token_s.p50
    if first is None or between is None:
        raise SystemExit(f"{name}: no times")
    return Lone(name, first, between)


def apart(times: Sequence[Lone]) -> float:
    """Return the largest difference of lone times among fleets, as a share."""
    firsts, betweens = [one.first_token_s for one in times], [one.inter_token_s for one in times]
    return max(max(firsts) / min(firsts), max(betweens) / min(betweens)) - 1


def gains(rows: Mapping[tuple[str, str], Sequence[BenchRow]], number: int) -> Iterator[Gain]:
    """Yield what kv brings in a round, by system and load."""
    for system in SYSTEMS:
        for kv, turns in zip(*(rows[system, policy] for policy in POLICIES), strict=True):
            assert kv.first_token_s.p50 is not None
            assert turns.first_token_s.p50 is not None
            yield Gain(
                system,
                kv.name,
                number,
                kv.requests_per_s / turns.requests_per_s,
                turns.first_token_s.p50 / kv.first_token_s.p50,
            )


def goals_of(found: Sequence[Gain]) -> list[Goal]:
    """Return, for each load, the medians of our gains, with the peer's as their goals."""
    goals = []
    for load in dict.fromkeys(gain.load for gain in found):
        for figure in ("throughput", "first_token"):
            ours, theirs = (
                statistics.median(getattr(each, figure) for each in found if each.system == name and each.load == load)
                for name in SYSTEMS
            )
            goals.append(Goal(f"{load}: {figure}, kv over round-robin", ours, "times", theirs, met=ours >= theirs))
    return goals


def run(flags: argparse.Namespace, directory: Path) -> tuple[list[Lone], list[BenchRow], list[Gain]]:
    """Start the fleets and measure them in rounds."""
    load = BenchFlags(
        url="",
        words=PROMPT,
        tokens=True,
        prefix_ratio=f"{SHARED:g}",
        prefixes=BEGINNINGS,
        output_tokens=ANSWER,
        concurrency=flags.concurrency,
        requests=REQUESTS,
        may_stop=False,
    )
    alone = replace(load, concurrency="1", requests=LONE_REQUESTS, prefix_ratio="0", prefixes=1)
    names = [(system, policy) for policy in POLICIES for system in SYSTEMS]
    rows: list[BenchRow] = []
    found: list[Gain] = []
    with ExitStack() as fleets:
        running: dict[tuple[str, str], RunningStack] = {}
        for system, policy in names:
            (place := directory / f"{system}-{policy}").mkdir()
            fleet = our_fleet(policy, flags.peer / "model", place) if system == "ours" else None
            running[system, policy] = fleets.enter_context(
                fleet or peer_fleet(policy, flags.peer, place, flags.peer_front.split())
            )
        times = [lone(*called) for called in ((" ".join(name), _turn(running[name], alone, name, 0)) for name in names)]
        for number in range(1, flags.rounds + 1):
            order = names if number % 2 else reversed(names)
            turn = {name: _turn(running[name], load, name, number) for name in order}
            rows += [row for name in names for row in turn[name]]
            found += gains(turn, number)
    return times, rows, found


def _turn(fleet: RunningStack, flags: BenchFlags, name: tuple[str, str], number: int) -> list[BenchRow]:
    return asyncio.run(measured(fleet, flags, " ".join(name), number))


def main() -> None:
    """Measure, and print the gains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer", type=Path, required=True, help="the yardstick's directory")
    parser.add_argument("--peer-front", default="", help="more flags of the yardstick's frontend with kv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="8,24")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    flags.peer = flags.peer.resolve()
    with tempfile.TemporaryDirectory() as directory:
        times, rows, found = run(flags, Path(directory))
    goals = goals_of(found)
    if (difference := apart(times)) > MOST_APART:
        print(f"the engines' times differ by {difference:.0%}: this run does not count", file=sys.stderr)
        goals = [replace(goal, met=False) for goal in goals]
    if flags.json:
        print(msgspec.json.encode(report("routing_gain", sys.argv[1:], goals, [*times, *rows, *found])).decode())
        return
    for one in times:
        first, between = one.first_token_s, one.inter_token_s
        print(f"{one.fleet}: lone first token {first:.3f} s, between tokens {between:.4f} s")
    for row in rows:
        first = row.first_token_s.p50 or 0.0
        print(f"{row.full_name}: {row.requests_per_s:.1f} requests/s, first token p50 {first:.3f} s")
    for goal in goals:
        print(f"{goal.name}: {goal.value:.2f}, Dynamo's {goal.goal:.2f}")


if __name__ == "__main__":
    main()
