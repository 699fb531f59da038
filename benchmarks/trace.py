"""How much of a real trace's cache hits does each routing policy keep, and at what time to the first token?

The Mooncake conversation trace (github.com/kvcache-ai/Mooncake, FAST'25: 12,031 requests, 145 M prompt tokens, blocks
of 512) through 4, 8 and 16 workers of 6,000 blocks, in virtual time (`services/virtual` says what is real and what is a
model). The arrivals are the trace's, bursts included; time is stretched to 0.5, 0.8 and 0.95 of the workers' capacity.

capacity    requests a second that one worker gets through, with a cache that holds everything, when 128 of the trace's
            requests are always there; times the workers. No policy can serve more, for the ideal cache saves the most.
hit rate    cached prompt tokens over prompt tokens; `of ideal` divides by what one unbounded shared cache would find
            by order of arrival (`loads.py`: 37.3 % of the tokens; one shared cache of 8 x 6,000 blocks, least recently
            used first out, finds 96.9 % of that).
imbalance   prompt tokens computed in a window of 60 s, the busiest worker's over the mean; p90 over the windows.
ttft        from arrival to the first token; requests that wait at the end are waited for.

What could mislead: time is a model's (an 8B model on one H200, `services/worker/simulated/timing.py`), without jitter;
engines are equal; the trace's output lengths are kept, but outputs never reappear in prompts, as the trace does not say
which tokens they were, so real conversations hit more. The trace is one hour of one service. Where a policy is given
more than it can serve (random from 0.8 on), all workers are always busy, and so evenly loaded: its imbalance says
nothing, its time to the first token grows with the length of the trace. Any change in the order of things moves hits by
0.2 %.

With --hour only the policy `kv` runs, with 8 workers and at the trace's own pace, which takes an hour. The question is
then how much processor time that takes of one core.

    python -m benchmarks.trace --trace conversation_trace.jsonl [--quick | --hour] [--json] [--plot FILE] [--jobs N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, print_report, report
from services.router.selection.policy import BUILT_IN
from services.virtual.fleet import WINDOW_S, SimulatedFleet
from services.virtual.loads import Ideal, LoadTrace, ideal, read_trace
from services.virtual.machine import StepTime
from services.worker.config import SimulatedConfig
from services.worker.simulated.timing import Timing

FLEETS: tuple[int, ...] = (4, 8, 16)
LOADS: tuple[float, ...] = (0.5, 0.8, 0.95)
WORKER_BLOCKS = 6000
ALL_BLOCKS = 1 << 18
IN_FLIGHT = 128
HITS_GOAL = 0.95
QUICK_REQUESTS = 2000
HOUR_WORKERS = 8
HOUR_GOAL_S = 60.0


class TraceRow(Struct, frozen=True):
    """The result of one policy at one load."""

    policy: str
    workers: int
    load: float
    """The load as a share of capacity."""
    requests_per_s: float
    hit_rate: float
    """Cached prompt tokens over prompt tokens."""
    of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    latency_mean_s: float
    """The mean time to the last token."""
    output_tokens_per_s: float
    """Output tokens a second, from the first arrival to the last end."""
    imbalance: float
    failed: int


class HourRow(Struct, frozen=True):
    """What the simulation of the trace at its own pace took."""

    requests: int
    simulated_s: float
    steps: int
    """The steps of all workers."""
    cpu_s: float
    step_us: float
    """Microseconds of processor time a step, everything included."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, 8 workers, load 0.8")
    parser.add_argument("--hour", action="store_true", help="the time that a simulation of the trace as it is takes")
    parser.add_argument("--policies", nargs="+", default=[], help="by name or module:attribute")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures do not depend on it")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    load = read_trace(flags.trace)
    if flags.hour:
        hour = _hour(load)
        goal = Goal(
            f"one hour, {HOUR_WORKERS} workers, one core", hour.cpu_s, "s", HOUR_GOAL_S, hour.cpu_s <= HOUR_GOAL_S
        )
        print_report("trace", [goal], [msgspec.to_builtins(hour)], as_json=flags.json)
        return 0
    policies, fleets, loads = flags.policies or list(BUILT_IN), FLEETS, LOADS
    if flags.quick:
        load, fleets, loads = load.first(QUICK_REQUESTS), (8,), (0.8,)
        policies = flags.policies or ["kv", "round-robin", "random"]
    rate = capacity(load)
    runs = [(load, policy, size, part, rate) for size in fleets for part in loads for policy in policies]
    rows = list(_all(runs, flags.jobs))
    if flags.plot:
        _plot(rows, flags.plot)
    if flags.json:
        print(msgspec.json.encode(report("trace", sys.argv[1:], _goals(rows), rows)).decode())
        return 0
    print(f"capacity of one worker: {rate:.2f} requests/s")
    for row in rows:
        print(line(row))
    return 0


def _hour(load: LoadTrace) -> HourRow:
    fleet = SimulatedFleet(load, "kv", capacity_blocks=WORKER_BLOCKS)
    for _ in range(HOUR_WORKERS):
        fleet.join(default_timing())
    began_s = time.process_time()
    fleet.run()
    cpu_s = time.process_time() - began_s
    steps = sum(worker.last.progress for worker in fleet.workers.values())
    return HourRow(len(load.requests), fleet.clock.now_s, steps, cpu_s, 1e6 * cpu_s / steps)


def _all(runs: Sequence[tuple[LoadTrace, str, int, float, float]], jobs: int) -> Iterable[TraceRow]:
    if jobs == 1:
        yield from (_one(run) for run in runs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_one, runs)


def default_timing() -> StepTime:
    """Return the step time of an 8B model on one H200."""
    return Timing(SimulatedConfig()).step_s


def capacity(load: LoadTrace, step_s: StepTime | None = None) -> float:
    """Return how many requests a second one worker can serve; the module explains it."""
    fleet = SimulatedFleet(load, "round-robin", capacity_blocks=ALL_BLOCKS)
    fleet.join(step_s or default_timing())
    fleet.run_closed(IN_FLIGHT)
    return len(load.requests) / fleet.clock.now_s


def _one(run: tuple[LoadTrace, str, int, float, float]) -> TraceRow:
    load, policy, workers, part, rate = run
    return run_open(load.at(part * workers * rate), policy, [default_timing()] * workers, part)


def run_open(load: LoadTrace, policy: str, workers: Sequence[StepTime], part: float) -> TraceRow:
    """Run a load through workers of these speeds, at its own pace, which is `part` of their capacity."""
    fleet = SimulatedFleet(load, policy, capacity_blocks=WORKER_BLOCKS)
    for step_s in workers:
        fleet.join(step_s)
    fleet.run()
    return _measured(fleet, ideal(load), policy, len(workers), part)


def _measured(fleet: SimulatedFleet, best: Ideal, policy: str, workers: int, part: float) -> TraceRow:
    ended = [journey for journey in fleet.journeys if not journey.failed]
    ttft_s = sorted(journey.ttft_s for journey in ended)
    cached = sum(journey.cached_tokens for journey in ended)
    return TraceRow(
        policy=policy,
        workers=workers,
        load=part,
        requests_per_s=fleet.load.rate,
        hit_rate=cached / best.prompt_tokens,
        of_ideal=cached / best.cached_tokens if best.cached_tokens else 1.0,
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p90_s=_quantile(ttft_s, 0.9),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        ttft_mean_s=sum(ttft_s) / len(ttft_s),
        latency_mean_s=sum(journey.end_s - journey.request.arrival_s for journey in ended) / len(ended),
        output_tokens_per_s=sum(journey.request.output_tokens for journey in ended) / fleet.clock.now_s,
        imbalance=imbalance(fleet, workers),
        failed=len(fleet.journeys) - len(ended),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def imbalance(fleet: SimulatedFleet, workers: int) -> float:
    """Return the imbalance over full windows up to the last arrival; later ones say nothing about balance."""
    windows: dict[int, list[int]] = {}
    last_s = fleet.load.requests[-1].arrival_s
    for (number, _), tokens in fleet.prefilled.items():
        windows.setdefault(number, []).append(tokens)
    whole = [tokens for number, tokens in windows.items() if (number + 1) * WINDOW_S <= last_s]
    return _quantile(sorted(max(each) * workers / sum(each) for each in whole), 0.9) if whole else 1.0


# --- output


def _goals(rows: Sequence[TraceRow]) -> list[Goal]:
    """Compare the rows of 8 workers with the goals, at every load."""
    goals = []
    for row in rows:
        if row.policy != "kv" or row.workers != 8:
            continue
        name = f"hits of ideal, 8 workers, load {row.load}"
        goals.append(Goal(name, row.of_ideal, "share", HITS_GOAL, row.of_ideal >= HITS_GOAL))
        rival = next((each for each in rows if (each.policy, each.workers, each.load) == ("random", 8, row.load)), None)
        if rival is not None:
            name = f"imbalance, 8 workers, load {row.load} (goal: below random's)"
            goals.append(Goal(name, row.imbalance, "ratio", rival.imbalance, row.imbalance < rival.imbalance))
    return goals


def line(row: TraceRow) -> str:
    """Return a row as a line of the table."""
    return (
        f"{row.workers:3} workers  load {row.load:4.2f}  {row.policy:13}  hits {row.hit_rate:6.1%} "
        f"({row.of_ideal:6.1%} of ideal)  ttft {row.ttft_p50_s:6.2f} {row.ttft_p90_s:7.2f} {row.ttft_p99_s:7.2f} s  "
        f"latency {row.latency_mean_s:7.2f} s  {row.output_tokens_per_s:6.0f} tokens/s  imbalance {row.imbalance:.2f}"
        + (f"  {row.failed} failed" if row.failed else "")
    )


def _plot(rows: Sequence[TraceRow], path: Path) -> None:
    from benchmarks.plot import Panel, draw  # matplotlib is among the development packages only

    panels = []
    for workers in sorted({row.workers for row in rows}):
        here = {policy: [row for row in rows if row.workers == workers and row.policy == policy] for policy in BUILT_IN}
        told = {policy: found for policy, found in here.items() if found}
        loads = {policy: [row.load for row in found] for policy, found in told.items()}
        hits = {policy: (loads[policy], [100 * row.of_ideal for row in found]) for policy, found in told.items()}
        ttft = {policy: (loads[policy], [row.ttft_p90_s for row in found]) for policy, found in told.items()}
        spread = {policy: (loads[policy], [row.imbalance for row in found]) for policy, found in told.items()}
        panels += [
            Panel(f"{workers} workers: hits", "load", "% of the ideal cache's", hits, goal=100 * HITS_GOAL),
            Panel(f"{workers} workers: first token", "load", "p90, seconds", ttft, log=True),
            Panel(f"{workers} workers: imbalance", "load", "busiest over mean, p90 of 60 s", spread),
        ]
    draw(panels, path, columns=3)


if __name__ == "__main__":
    raise SystemExit(main())
