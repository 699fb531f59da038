"""What does a machine's block store change for a real trace, when its workers' own memory is small?

The Mooncake conversation trace (github.com/kvcache-ai/Mooncake, FAST'25) has 12,031 requests in an hour, with 145 M
prompt tokens in blocks of 512. It goes through 4 simulated workers of 1,000 blocks with the router's `kv` policy, in
virtual time (`services/virtual` says what is real and what is a model). The workers run without a store,
with one of 8,000 blocks in memory, and with 64,000 more blocks on disk. A block is 64 MiB: for an 8B model on four
H200s that is 63 GiB a worker, 500 GiB of memory, and 4 TiB of disk. Open loops run at 0.3 to 0.9 of the load that the
workers could serve if they held everything (`trace.py`: capacity); a closed loop has 64 requests a worker at any time,
for throughput.

hit rate     cached prompt tokens over prompt tokens, by where they came from: the device's own cache, the store's
             memory, its disk. Ideal: what one unbounded cache would find, by order of arrival.
ttft         from arrival to the first token; requests that wait at the end are waited for.
throughput   output tokens a second, from the first arrival to the last end.

What could mislead: time is a model's, without jitter: steps as on that GPU; copies at 50 GB/s a direction, which slow
no step; a message takes 1 ms; the disk reads 6 GB/s and writes 3 GB/s, one block after another. Nothing fails.
Outputs never reappear in prompts, as the trace does not say which tokens they were, so real conversations hit more. The
trace is one hour of one service, in which the disk never fills.

    python -m benchmarks.tiers_trace --trace conversation_trace.jsonl [--requests N] [--quick] [--json] [--plot FILE]
                                     [--jobs N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.trace import capacity, default_timing
from services.virtual.fleet import SimulatedFleet
from services.virtual.loads import LoadTrace, ideal, read_trace
from services.virtual.store import StoreSizes

WORKERS = 4
WORKER_BLOCKS = 1000
LOADS: tuple[float, ...] = (0.3, 0.6, 0.9, 0.0)
"""The load as a share of capacity; 0 for a closed loop."""
IN_FLIGHT = 64 * WORKERS
STORES: dict[str, StoreSizes | None] = {
    "none": None,
    "memory": StoreSizes(slots=8000, records=0),
    "memory and disk": StoreSizes(slots=8000, records=64_000),
}
QUICK_REQUESTS = 1500


class TiersRow(Struct, frozen=True):
    """The result of one store at one load."""

    store: str
    load: float
    """The load as a share of capacity; 0 for a closed loop."""
    requests_per_s: float
    """Requests that came per second, or in a closed loop were served."""
    hit_rate: float
    """Cached prompt tokens over prompt tokens; the sum of the next three."""
    device: float
    host: float
    disk: float
    of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    latency_mean_s: float
    """The mean time to the last token."""
    output_tokens_per_s: float
    looked_up_blocks: int
    """Blocks that engines requested from the store."""
    found_in_host: float
    """The share of these that was found in host memory."""
    found_on_disk: float
    failed: int


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, load 0.6")
    parser.add_argument("--requests", type=int, help="the trace's first ones; all where it is left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures do not depend on it")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    load, loads = read_trace(flags.trace), LOADS
    load = load.first(flags.requests or len(load.requests))
    if flags.quick:
        load, loads = load.first(QUICK_REQUESTS), (0.6,)
    rate = WORKERS * capacity(load)
    rows = []
    for row in _all([(load, store, part, rate) for part, store in product(loads, STORES)], flags.jobs):
        rows.append(row)
        if not flags.json:
            print(_line(row), flush=True)
    goals = _goals(rows)
    if flags.plot:
        _plot(rows, flags.plot)
    if flags.json:
        print(msgspec.json.encode(report("tiers_trace", sys.argv[1:], goals, rows)).decode())
    else:
        print("\n".join(f"{goal.name}: {goal.value} (goal {goal.goal})" for goal in goals))
    return 0


def _all(runs: Sequence[tuple[LoadTrace, str, float, float]], jobs: int) -> Iterable[TiersRow]:
    if jobs == 1:
        yield from (_one(run) for run in runs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_one, runs)


def _one(run: tuple[LoadTrace, str, float, float]) -> TiersRow:
    load, store, part, rate = run
    fleet = SimulatedFleet(
        load.at(part * rate) if part else load, "kv", capacity_blocks=WORKER_BLOCKS, sizes=STORES[store]
    )
    for _ in range(WORKERS):
        fleet.join(default_timing())
    if part:
        fleet.run()
    else:
        fleet.run_closed(IN_FLIGHT)
    return _measured(fleet, store, part)


def _measured(fleet: SimulatedFleet, store: str, part: float) -> TiersRow:
    best = ideal(fleet.load)
    ended = [journey for journey in fleet.journeys if not journey.failed]
    ttft_s = sorted(journey.ttft_s for journey in ended)
    cached = sum(journey.cached_tokens for journey in ended)
    host = sum(journey.cached_host_tokens for journey in ended)
    disk = sum(journey.cached_disk_tokens for journey in ended)
    blocks = fleet.store
    return TiersRow(
        store=store,
        load=part,
        requests_per_s=fleet.load.rate if part else len(ended) / fleet.clock.now_s,
        hit_rate=cached / best.prompt_tokens,
        device=(cached - host - disk) / best.prompt_tokens,
        host=host / best.prompt_tokens,
        disk=disk / best.prompt_tokens,
        of_ideal=cached / best.cached_tokens,
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p90_s=_quantile(ttft_s, 0.9),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        latency_mean_s=sum(journey.end_s - journey.asked_s for journey in ended) / len(ended),
        output_tokens_per_s=sum(journey.request.output_tokens for journey in ended) / fleet.clock.now_s,
        looked_up_blocks=blocks.looked_up if blocks else 0,
        found_in_host=blocks.in_host / blocks.looked_up if blocks and blocks.looked_up else 0.0,
        found_on_disk=blocks.on_disk / blocks.looked_up if blocks and blocks.looked_up else 0.0,
        failed=len(fleet.journeys) - len(ended),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# --- output


def _goals(rows: Sequence[TiersRow]) -> list[Goal]:
    """Require that memory is no worse than no store, and disk no worse than memory alone, at any load."""
    goals = []
    for load in dict.fromkeys(row.load for row in rows):
        here = {row.store: row for row in rows if row.load == load}
        for with_it, without in (("memory", "none"), ("memory and disk", "none")):
            better, worse = here[with_it], here[without]
            where = f"{with_it}, {f'load {load}' if load else 'closed loop'}"
            goals.append(_goal(f"hit rate with {where}, of that without", better.hit_rate / worse.hit_rate))
            if load:
                for name in ("p50", "p90", "p99"):
                    ratio = getattr(worse, f"ttft_{name}_s") / getattr(better, f"ttft_{name}_s")
                    goals.append(_goal(f"ttft {name} without, of that with {where}", ratio))
            else:
                ratio = better.output_tokens_per_s / worse.output_tokens_per_s
                goals.append(_goal(f"throughput with {where}, of that without", ratio))
    return goals


def _goal(name: str, value: float) -> Goal:
    return Goal(name, round(value, 3), "ratio", 1.0, value >= 1.0)


def _line(row: TiersRow) -> str:
    load = f"load {row.load:4.2f}  " if row.load else "closed loop"
    return (
        f"{load}  {row.store:16} {row.requests_per_s:6.2f} requests/s  hits {row.hit_rate:6.1%} = {row.device:6.1%} "
        f"device + {row.host:6.1%} memory + {row.disk:6.1%} disk ({row.of_ideal:6.1%} of ideal)  ttft "
        f"{row.ttft_p50_s:6.2f} {row.ttft_p90_s:7.2f} {row.ttft_p99_s:7.2f} s  {row.output_tokens_per_s:6.0f} tokens/s"
        + (f"  {row.failed} failed" if row.failed else "")
    )


def _plot(rows: Sequence[TiersRow], path: Path) -> None:
    from benchmarks.plot import Panel, draw  # matplotlib is among the development packages only

    opened = {store: [row for row in rows if row.store == store and row.load] for store in STORES}
    loads = {store: [row.load for row in found] for store, found in opened.items()}
    hits = {store: (loads[store], [100 * row.hit_rate for row in found]) for store, found in opened.items()}
    panels = [Panel("cached prompt tokens", "load", "%", hits)]
    for name in ("p50", "p90", "p99"):
        ttft = {
            store: (loads[store], [getattr(row, f"ttft_{name}_s") for row in found]) for store, found in opened.items()
        }
        panels.append(Panel(f"first token, {name}", "load", "seconds", ttft, log=True))
    draw(panels, path, columns=2)


if __name__ == "__main__":
    raise SystemExit(main())
