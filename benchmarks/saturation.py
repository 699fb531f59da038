"""Does routing hold where a fleet is nearly, or more than, busy: on loads that its constants were not chosen on?

conversation   windows of the Mooncake conversation trace, in blocks of 512
agents, chats  made-up loads of `loads.py`
tenants        made-up services with their own system prompts, by `saturation_loads.py`, in the manner of ServeGen: few
               have most requests, each has its own lengths, arrivals come in bursts, conversations go on
names          traces of `--also`, in the format of Mooncake's

Constants were chosen on the loads with a star. On Mooncake's synthetic trace and on tenants2 what was wrong was found.

Each load runs through 8 and 16 workers at shares of their capacity (`trace.py` explains it), in virtual time.

of ideal    cached prompt tokens, of those that one unbounded cache would find by order of arrival
of shared   the same, of those that one cache of all workers' blocks would find, least recently used first out: where
            that is much less than the ideal, no choice among the workers reaches the ideal
imbalance   prompt tokens computed in 60 s, the busiest worker's over the mean; p90 of the windows
first token from arrival, p50, p90, p99 and the longest; `long` is the p90 of the tenth with the longest prompts, which
            shows who pays for an order that is not first come, first served
gap         between two tokens of an answer, p99

What could mislead: `trace.py` says it; the made-up loads are made up.

    python -m benchmarks.saturation --trace conversation_trace.jsonl [--also FILE …] [--requests N] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from benchmarks.report import Goal, report
from benchmarks.saturation_loads import tenants
from benchmarks.trace import WORKER_BLOCKS, capacity, default_timing, imbalance
from services.virtual.fleet import SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import Ideal, LoadTrace, agents, chats, ideal, read_trace
from services.virtual.run import percentiles
from services.worker.config import OVERTAKING

FLEETS = (8, 16)
STARRED = ("conversation0", "agents", "chats", "synthetic_trace", "tenants2")
TENANTS = 4
SHARES = (0.5, 0.8, 0.95, 1.05)
HITS_GOAL = 0.95


class SaturationRow(Struct, frozen=True):
    """The result of one load, fleet and share of its capacity."""

    load: str
    chosen_on: bool
    """Whether constants were chosen on this load."""
    workers: int
    share: float
    """The rate of requests, of the workers' capacity."""
    of_ideal: float
    of_shared: float
    imbalance: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_most_s: float
    long_ttft_p90_s: float
    gap_p99_s: float
    latency_mean_s: float
    failed: int


class Loads(Struct, frozen=True):
    """A load at its own pace, and what is known of it."""

    load: LoadTrace
    chosen_on: bool
    rate: float
    """The requests a second that one worker gets through."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="other traces in its format")
    parser.add_argument("--requests", type=int, default=3000, help="of each load")
    parser.add_argument("--loads", nargs="*", default=[], help="only these, by name")
    parser.add_argument("--workers", type=int, nargs="*", default=FLEETS)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--policy", default="kv", help="by name or module:attribute")
    parser.add_argument("--overtaking", type=float, default=OVERTAKING, help="the workers' setting")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = []
    for each in _loads(flags.trace, flags.also, flags.requests, flags.loads):
        for workers in flags.workers:
            for share in flags.shares:
                rows.append(_run(each, flags.policy, workers, share, flags.overtaking))
                if not flags.json:
                    print(line(rows[-1]), flush=True)
    if flags.json:
        print(msgspec.json.encode(report("saturation", sys.argv[1:], _goals(rows), rows)).decode())
    return 0


def _loads(trace: Path | None, also: Sequence[Path], requests: int, names: Sequence[str]) -> Iterator[Loads]:
    for load in _made(trace, also, requests):
        if not names or load.name in names:
            yield Loads(load, load.name in STARRED, capacity(load))


def _made(trace: Path | None, also: Sequence[Path], requests: int) -> Iterator[LoadTrace]:
    if trace is not None:
        whole = read_trace(trace)
        for number, start in enumerate(range(0, len(whole.requests) - requests + 1, requests)):
            window = whole.window(start, requests)
            yield LoadTrace(f"conversation{number}", window.block_size, window.requests)
    for path in also:
        load = read_trace(path).first(requests)
        yield LoadTrace(path.stem, load.block_size, load.requests)
    yield agents(requests, Random(3))
    yield chats(requests, Random(2))
    for seed in range(1, TENANTS + 1):
        yield tenants(f"tenants{seed}", requests, Random(seed))


def _run(of: Loads, policy: str, workers: int, share: float, overtaking: float = OVERTAKING) -> SaturationRow:
    load, gaps = of.load.at(share * workers * of.rate), TokenGaps()
    fleet = SimulatedFleet(load, policy, capacity_blocks=WORKER_BLOCKS, gaps=gaps, overtaking=overtaking)
    for _ in range(workers):
        fleet.join(default_timing())
    fleet.run()
    ended = [each for each in fleet.journeys if not each.failed]
    cached = sum(each.cached_tokens for each in ended)
    longest = sorted(ended, key=lambda each: -each.request.prompt_tokens)[: max(1, len(ended) // 10)]
    ttft, best = percentiles([each.ttft_s for each in ended]), ideal(load)
    return SaturationRow(
        load=load.name,
        chosen_on=of.chosen_on,
        workers=workers,
        share=share,
        of_ideal=cached / best.cached_tokens if best.cached_tokens else 1.0,
        of_shared=cached / max(1, shared(load, workers * WORKER_BLOCKS).cached_tokens),
        imbalance=imbalance(fleet, workers),
        ttft_p50_s=ttft.p50,
        ttft_p90_s=ttft.p90,
        ttft_p99_s=ttft.p99,
        ttft_most_s=max(each.ttft_s for each in ended),
        long_ttft_p90_s=percentiles([each.ttft_s for each in longest]).p90,
        gap_p99_s=percentiles(gaps.all_s).p99,
        latency_mean_s=sum(each.end_s - each.request.arrival_s for each in ended) / len(ended),
        failed=len(fleet.journeys) - len(ended),
    )


def shared(load: LoadTrace, blocks: int) -> Ideal:
    """Compute the hits of one cache of `blocks` blocks from the order of arrival, least recently used first out."""
    size, kept = load.block_size, OrderedDict[int, None]()
    full = found = 0
    for request in load.requests:
        for name in request.names[: (request.prompt_tokens - 1) // size]:
            if name not in kept:
                break
            found += 1
        names = request.names[: request.prompt_tokens // size]
        full += len(names)
        for name in reversed(names):  # as engines release them: the end of a prompt leaves before its beginning
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return Ideal(sum(each.prompt_tokens for each in load.requests), found * size, full, found)


def _goals(rows: Sequence[SaturationRow]) -> list[Goal]:
    """Compare hits on loads that were not chosen on with the goal, at load 0.95."""
    return [
        Goal(f"hits of ideal, {row.load}, {row.workers} workers", row.of_ideal, "share", HITS_GOAL, met)
        for row in rows
        if row.share == 0.95 and not row.chosen_on
        for met in [row.of_ideal >= HITS_GOAL]
    ]


def line(row: SaturationRow) -> str:
    """Return a row as a line of the table."""
    return (
        f"{row.workers:3} workers  {row.share:4.2f}  {row.load:14}{'*' if row.chosen_on else ' '} "
        f"{row.of_ideal:6.1%} of ideal {row.of_shared:6.1%} of shared  imbalance {row.imbalance:.2f}  first token "
        f"{row.ttft_p50_s:6.2f} {row.ttft_p90_s:6.2f} {row.ttft_p99_s:6.2f} most {row.ttft_most_s:6.2f} "
        f"long {row.long_ttft_p90_s:6.2f}  gap {row.gap_p99_s:.3f}  latency {row.latency_mean_s:6.2f}"
        + (f"  {row.failed} failed" if row.failed else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
