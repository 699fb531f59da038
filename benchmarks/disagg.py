"""When does it pay to compute prompts on some workers and to decode on others?

Windows of the Mooncake conversation trace (github.com/kvcache-ai/Mooncake, FAST'25) go through 8 simulated workers
with the router's `kv` policy, in virtual time (`services/virtual` says what is real and what is a model).
Each worker is an 8B model on one H200 (`services/worker/simulated/timing.py`) with 1,800 blocks of 512 tokens, 113 GiB.
All of them share a block store of 16,000 blocks in memory, 1 TiB. The first half of the load is also run with answers
three times as long, and with all requests of 20 s in the first 10 of them. Each window is a run of its own, which
begins with empty caches.

aggregated   8 workers that do all.
fixed p+d    p workers that compute prompts and d that decode: each prompt is handed over (`split_costs` is replaced).
mixed p+d    the same workers, where the router compares a pair with a single worker for each request.
steps        how long a step with parts of prompts may take (`worker.step_s`), in seconds: aggregated workers have 0.25,
             the default, 0.05 or 0.03. The others have the default, and their roles bound it: 0.05 where prompts
             are computed, 0.03 where is decoded.

load         The arrival times are stretched to 0.8 of what the 8 aggregated workers bear: the requests a second that
             end in a closed loop with 64 requests a worker, after the first 512 have ended and until the last begins.
ttft         from arrival to the first token; requests that wait at the end are waited for.
itl          all times from a token to the next one of the same answer, hand-overs included.
second       from the first token to the second one, of what is handed over.
early        the blocks that workers which decode have loaded before a request came, divided by the full blocks of what
             is handed over.
computed     the share of all computed prompt tokens that workers which decode have computed; the rest of a prompt that
             fills no block counts, too.
throughput   output tokens a second, from the first arrival to the last end: below load 1 mostly that of the arrivals.
best         the split, and the mix, with the least mean time to the last token, over all windows. The split is compared
             with aggregated workers, and the mix with both, figure by figure and window by window: a goal is met by the
             median of the ratios, whose range is reported.

What could mislead: time is a model's, without jitter. Copies run at 50 GB/s a direction and worker, however many there
are, and slow no step (measured: 1 to 9 %). Blocks of 512 tokens leave 256 of a prompt for the worker that decodes, in
the mean; an engine's usual blocks of 16 leave 8. Outputs never reappear in prompts. The weights of the comparison were
chosen on these loads.

    python -m benchmarks.disagg --trace conversation_trace.jsonl [--requests N] [--starts N …] [--loads NAME …]
                                [--quick] [--json] [--jobs N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.trace import default_timing
from services.router.selection.pairs import SplitCosts
from services.router.selection.policies.kv import split_costs
from services.virtual.fleet import SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import LoadTrace, read_trace
from services.virtual.store import StoreSizes
from services.virtual.workers import LONGEST_STEP_S
from shared.messages.cards import Role

WORKERS = 8
WORKER_BLOCKS = 1800
STORE = StoreSizes(slots=16_000, records=0)
LOAD = 0.8
IN_FLIGHT = 64 * WORKERS
REQUESTS = 2000
QUICK_REQUESTS = 600
SHORT_STEPS_S = (0.05, 0.03)
LONGER = 3
LOADS = ("trace", "long answers", "bursts")
BURST_PERIOD_S = 20.0
BURST_SHARE = 0.5
ITL_GOAL = 0.5
AS_GOOD = 1.05
"""The factor up to which two figures count as equal."""


class Setup(Struct, frozen=True):
    """A fleet of workers: how many compute prompts (0: all workers do all), and how long steps may be, in seconds."""

    kind: Literal["aggregated", "fixed", "mixed"]
    prefill: int = 0
    step_s: float = LONGEST_STEP_S

    @property
    def decode(self) -> int:
        return WORKERS - self.prefill


SETUPS: tuple[Setup, ...] = (
    Setup("aggregated"),
    *(Setup("aggregated", 0, step_s) for step_s in SHORT_STEPS_S),
    *(Setup("fixed", prefill) for prefill in (4, 5, 6)),
    *(Setup("mixed", prefill) for prefill in (4, 5)),
)
"""Fewer than four workers for prompts cannot compute those of any of these loads, if all are handed over."""


class WindowsGoal(Goal, frozen=True):
    """A goal whose value is the median over windows."""

    least: float
    most: float


class SplitRow(Struct, frozen=True):
    """The result of one fleet at one load."""

    load: str
    start: int
    """The number of the window's first request."""
    kind: str
    prefill: int
    decode: int
    step_s: float
    """The bound of steps with parts of prompts."""
    requests_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p90_s: float
    itl_p99_s: float
    itl_p999_s: float
    second_p50_s: float
    """0 if nothing is handed over."""
    second_p90_s: float
    handed_over: float
    """The share of the requests that were handed over."""
    early: float
    """The blocks that came before their requests, divided by the full blocks of what was handed over."""
    computed: float
    """The share of the computed prompt tokens that workers which decode have computed."""
    hit_rate: float
    """Cached prompt tokens over prompt tokens."""
    output_tokens_per_s: float
    latency_mean_s: float
    """The mean time to the last token."""
    failed: int


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each window")
    parser.add_argument("--starts", type=int, nargs="+", default=[0], help="the first request of each window")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests of the trace as it is")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures do not depend on it")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    trace, loads = read_trace(flags.trace), dict[tuple[str, int], LoadTrace]()
    for start in flags.starts:
        known = cases(trace.window(start, QUICK_REQUESTS if flags.quick else flags.requests))
        loads |= {(name, start): known[name] for name in (["trace"] if flags.quick else flags.loads)}
    rows: list[SplitRow] = []
    with ProcessPoolExecutor(flags.jobs) as pool:
        borne = dict(zip(loads, pool.map(capacity, loads.values()), strict=True))
        runs = [(*name, load.at(LOAD * borne[name]), setup) for name, load in loads.items() for setup in SETUPS]
        for row in pool.map(_one, runs):
            rows.append(row)
            print(_line(row), file=sys.stderr if flags.json else sys.stdout, flush=True)
    goals = [
        goal
        for load in dict.fromkeys(row.load for row in rows)
        for goal in goals_of([row for row in rows if row.load == load])
    ]
    if flags.json:
        print(msgspec.json.encode(report("disagg", sys.argv[1:], goals, rows)).decode())
    else:
        for each in goals:
            spread = f"{each.value}, {each.least} to {each.most} (goal {each.goal})"
            print(f"{each.name}: {spread}{'' if each.met else ' MISSED'}")
    return 0


# --- loads


def cases(load: LoadTrace) -> dict[str, LoadTrace]:
    """Return the load as it is, its first half with longer answers, and that half as it is, to come in bursts
    (`in_bursts`) after its arrival times were stretched."""
    half = load.first(len(load.requests) // 2)
    longer = [replace(each, output_tokens=LONGER * each.output_tokens) for each in half.requests]
    return dict(zip(LOADS, (load, replace(half, requests=longer), half), strict=True))


def in_bursts(load: LoadTrace) -> LoadTrace:
    """Return the load with all requests of each period in its first part."""

    def moved_s(time_s: float) -> float:
        began_s = time_s // BURST_PERIOD_S * BURST_PERIOD_S
        return began_s + (time_s - began_s) * BURST_SHARE

    return replace(load, requests=[replace(each, arrival_s=moved_s(each.arrival_s)) for each in load.requests])


def capacity(load: LoadTrace) -> float:
    """Return how many requests a second the aggregated workers bear; the module explains it."""
    in_flight = min(IN_FLIGHT, len(load.requests) // 4)
    fleet = fleet_of(load, Setup("aggregated"))
    fleet.run_closed(in_flight)
    ends_s = sorted(journey.end_s for journey in fleet.journeys)
    began_s, last_s = ends_s[in_flight], max(journey.asked_s for journey in fleet.journeys)
    return sum(began_s < end_s <= last_s for end_s in ends_s) / (last_s - began_s)


# --- runs


def fleet_of(load: LoadTrace, setup: Setup, gaps: TokenGaps | None = None) -> SimulatedFleet:
    """Return a fleet before its start."""
    compare: SplitCosts = always_a_pair if setup.kind == "fixed" else split_costs
    fleet = SimulatedFleet(load, "kv", capacity_blocks=WORKER_BLOCKS, sizes=STORE, compare=compare, gaps=gaps)
    for number in range(WORKERS):
        role: Role = "aggregated" if not setup.prefill else "prefill" if number < setup.prefill else "decode"
        fleet.join(default_timing(), role, longest_s=setup.step_s)
    return fleet


def always_a_pair(*_: object) -> tuple[float, float]:
    """Compare like `split_costs`, so that a pair always costs less."""
    return 0.0, 1.0


def _one(run: tuple[str, int, LoadTrace, Setup]) -> SplitRow:
    name, start, load, setup = run
    return run_split(name, start, in_bursts(load) if name == "bursts" else load, setup)


def run_split(name: str, start: int, load: LoadTrace, setup: Setup) -> SplitRow:
    """Run a load at its own pace."""
    gaps = TokenGaps()
    fleet = fleet_of(load, setup, gaps)
    fleet.run()
    ended = [journey for journey in fleet.journeys if not journey.failed]
    ttft_s = sorted(journey.ttft_s for journey in ended)
    itl_s, second_s = sorted(gaps.all_s), sorted(gaps.handed_over_s)
    decoding = set(list(fleet.workers)[setup.prefill :])
    computed = sum(tokens for (_, worker), tokens in fleet.prefilled.items() if worker in decoding)
    handed_over = [journey for journey in ended if journey.hand_overs]
    full_blocks = sum(journey.request.prompt_tokens // load.block_size for journey in handed_over)
    return SplitRow(
        load=name,
        start=start,
        kind=setup.kind,
        prefill=setup.prefill,
        decode=setup.decode,
        step_s=setup.step_s,
        requests_per_s=load.rate,
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p90_s=_quantile(ttft_s, 0.9),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        itl_p50_s=_quantile(itl_s, 0.5),
        itl_p90_s=_quantile(itl_s, 0.9),
        itl_p99_s=_quantile(itl_s, 0.99),
        itl_p999_s=_quantile(itl_s, 0.999),
        second_p50_s=_quantile(second_s, 0.5),
        second_p90_s=_quantile(second_s, 0.9),
        handed_over=len(handed_over) / len(ended),
        early=sum(worker.last.load.prefetched_blocks for worker in fleet.workers.values()) / max(full_blocks, 1),
        computed=computed / sum(fleet.prefilled.values()),
        hit_rate=sum(each.cached_tokens for each in ended) / sum(each.request.prompt_tokens for each in ended),
        output_tokens_per_s=sum(journey.request.output_tokens for journey in ended) / fleet.clock.now_s,
        latency_mean_s=sum(journey.end_s - journey.asked_s for journey in ended) / len(ended),
        failed=len(fleet.journeys) - len(ended),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


# --- output


def goals_of(rows: Sequence[SplitRow]) -> list[WindowsGoal]:
    """Compare the rows of one load: the best split with aggregated workers of each length of steps, and the best mix
    with these and with the split."""
    load, split, mix = rows[0].load, _best(rows, "fixed"), _best(rows, "mixed")
    steps_s = dict.fromkeys(row.step_s for row in rows if row.kind == "aggregated")
    whole = [_windows(rows, Setup("aggregated", 0, step_s)) for step_s in steps_s]
    goals = [_goal(f"{load}: itl p99", split, other, lambda row: row.itl_p99_s, ITL_GOAL) for other in whole]
    for other in (*whole, split):
        goals += [
            _goal(f"{load}: ttft p90", mix, other, lambda row: row.ttft_p90_s, AS_GOOD),
            _goal(f"{load}: itl p99", mix, other, lambda row: row.itl_p99_s, AS_GOOD),
            _goal(f"{load}: time a token", mix, other, lambda row: 1 / row.output_tokens_per_s, AS_GOOD),
        ]
    return goals


def _windows(rows: Iterable[SplitRow], setup: Setup) -> list[SplitRow]:
    return [row for row in rows if (row.kind, row.prefill, row.step_s) == (setup.kind, setup.prefill, setup.step_s)]


def _best(rows: Sequence[SplitRow], kind: Literal["fixed", "mixed"]) -> list[SplitRow]:
    """Return the rows of the setup of this kind with the least mean latency."""
    setups = dict.fromkeys(Setup(kind, row.prefill, row.step_s) for row in rows if row.kind == kind)
    return min((_windows(rows, setup) for setup in setups), key=lambda those: sum(row.latency_mean_s for row in those))


def _goal(
    name: str, ours: Sequence[SplitRow], theirs: Sequence[SplitRow], figure: Callable[[SplitRow], float], most: float
) -> WindowsGoal:
    ratios = [round(figure(our) / figure(their), 3) for our, their in zip(ours, theirs, strict=True)]
    value, full_name = round(median(ratios), 3), f"{name}, {_name(ours[0])} of {_name(theirs[0])}"
    return WindowsGoal(full_name, value, "ratio", most, value <= most, min(ratios), max(ratios))


def _name(row: SplitRow) -> str:
    return f"{row.kind} {row.prefill}+{row.decode}" if row.prefill else f"{row.kind}, steps of {row.step_s} s"


def _line(row: SplitRow) -> str:
    itl = " ".join(f"{1e3 * each:6.1f}" for each in (row.itl_p50_s, row.itl_p90_s, row.itl_p99_s, row.itl_p999_s))
    ttft = f"{row.ttft_p50_s:6.2f} {row.ttft_p90_s:6.2f} {row.ttft_p99_s:6.2f}"
    return (
        f"{row.load:12} {row.start:5} {_name(row):26} {row.requests_per_s:5.2f}/s  ttft {ttft} s  "
        f"itl {itl} ms  second {1e3 * row.second_p50_s:5.0f} {1e3 * row.second_p90_s:5.0f} ms  "
        f"handed over {row.handed_over:4.0%}  early {row.early:4.0%}  computed {row.computed:4.0%}  "
        f"hits {row.hit_rate:5.1%}  "
        f"{row.output_tokens_per_s:5.0f} tokens/s  latency {row.latency_mean_s:6.2f} s"
        + (f"  {row.failed} failed" if row.failed else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
