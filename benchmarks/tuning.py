"""What each setting does to first tokens, to the time between tokens and to throughput: the tables of docs/tuning.md.

All of it is simulated in virtual time (services/virtual): the real router, scheduler and block store, with the times of
an 8B model on one H200. So the figures depend on no machine and do not spread, and say nothing of a frontend's work.

block size    the same conversations, in blocks of 16 to 256 tokens
max_running   the most sequences of a step
step_s        how long a step with parts of prompts may take
tiers         a small cache on the GPU, with a block store in memory and on disk
workers       one worker on each GPU, or two that share it: half of its memory and, at any time, half of its speed
roles         8 workers, of which some compute only prompts
policies      who gets a request
topology      8 workers that do all, or the best division into roles, by the lengths of prompts and answers

A load of 0.8 is 0.8 of what the workers do of the same requests when they never wait.

    python -m benchmarks.tuning [--quick] [--jobs N] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from random import Random

import msgspec
from msgspec import Struct

from benchmarks.report import report
from benchmarks.trace import capacity, default_timing
from deploy.local.size.traffic import Lengths, drawn_traffic
from services.virtual.fleet import SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import LoadTrace, TraceRequest, agents, chats, ideal, unshared
from services.virtual.run import percentiles
from services.virtual.store import StoreSizes
from shared.messages.cards import Role

REQUESTS, QUICK_REQUESTS = 600, 120
KV_TOKENS, SMALL_KV_TOKENS = 600_000, 60_000
"""The tokens of KV that a worker has room for: 80 GB, and little enough that tiers matter."""


class Case(Struct, frozen=True):
    """One fleet under one load."""

    table: str
    load: str
    setting: str
    workers: int = 4
    prefill: int = 0
    part: float = 0.8
    policy: str = "kv"
    block: int = 64
    max_running: int = 64
    step_s: float = 0.25
    kv_tokens: int = KV_TOKENS
    host_tokens: int = 0
    disk_tokens: int = 0
    share: float = 1.0
    """The part of a GPU that each worker has."""


class TuningRow(Struct, frozen=True):
    """What came of one case."""

    table: str
    load: str
    setting: str
    hit_rate: float
    of_ideal: float
    """The cached tokens, divided by those of one unbounded cache with blocks of 16 tokens."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for load in ("chats", "agents"):
        for block in (16, 32, 64, 128, 256):
            yield Case("block size", load, f"{block}", block=block)
    for most in (8, 16, 32, 64, 128):
        yield Case("max_running", "long answers", f"{most}", max_running=most)
    for part in (0.5, 0.8):
        for step_s in (0.25, 0.1, 0.05, 0.025):
            yield Case("step_s", "long prompts", f"{step_s:g} at load {part:g}", step_s=step_s, part=part)
    for load in ("chats", "agents"):
        for host, disk in ((0, 0), (250_000, 0), (1_000_000, 0), (250_000, 4_000_000)):
            name = "GPU alone" if not host else f"{host:,} in memory" + (f", {disk:,} on disk" if disk else "")
            yield Case("tiers", load, name, kv_tokens=SMALL_KV_TOKENS, host_tokens=host, disk_tokens=disk, part=0.5)
    for load in ("unshared", "agents"):
        yield Case("workers", load, "one a GPU")
        yield Case("workers", load, "two a GPU", workers=8, share=0.5, kv_tokens=KV_TOKENS // 2)
    for prefill in (0, 2, 3, 4, 5, 6):
        yield _split("roles", "mixed", prefill)
    for load in ("unshared", "chats", "agents"):
        for policy in ("kv", "least-loaded", "power-of-two", "round-robin", "random"):
            yield Case("policies", load, policy, policy=policy)
    for load in ("long prompts", "mixed", "long answers"):
        for prefill in (0, 2, 4, 6):
            yield _split("topology", load, prefill)


def _split(table: str, load: str, prefill: int) -> Case:
    name = f"{prefill} + {8 - prefill}" if prefill else "8 that do all"
    return Case(table, load, name, workers=8, prefill=prefill, part=0.6, host_tokens=2_000_000)


@cache
def load_of(name: str, requests: int, block: int) -> LoadTrace:
    """Return a load by its name."""
    if name == "chats":
        return chats(requests, Random(2), block)
    if name == "agents":
        return agents(requests, Random(3), block)
    if name == "unshared":
        return unshared(requests, Random(1))
    prompt, output = {"long prompts": (6000, 100), "mixed": (2000, 250), "long answers": (500, 600)}[name]
    made = drawn_traffic(Lengths(8.0, requests, prompt, output, 0.5, 0, 4))
    rows = [
        TraceRequest(number, row.timestamp / 1000, row.hash_ids, row.input_length, max(1, row.output_length))
        for number, row in enumerate(made.rows)
    ]
    return LoadTrace(name, made.block_size, rows)


@cache
def capacity_of(name: str, requests: int) -> float:
    """Return what one worker does of a load, in requests a second."""
    return capacity(load_of(name, requests, 64))


def run_case(work: tuple[Case, int]) -> TuningRow:
    """Simulate one case."""
    case, requests = work
    load = load_of(case.load, requests, case.block)
    load = load.at(case.part * capacity_of(case.load, requests) * case.workers * case.share)
    size, gaps = load.block_size, TokenGaps()
    store = StoreSizes(case.host_tokens // size, case.disk_tokens // size) if case.host_tokens else None
    fleet = SimulatedFleet(
        load,
        case.policy,
        capacity_blocks=case.kv_tokens // size,
        sizes=store,
        gaps=gaps,
        max_running=case.max_running,
    )
    whole = default_timing()
    roles: list[tuple[Role, int]] = [("aggregated", case.workers)]
    if case.prefill:
        roles = [("prefill", case.prefill), ("decode", case.workers - case.prefill)]
    for role, number in roles:
        for _ in range(number):
            fleet.join(lambda works: whole(works) / case.share, role, longest_s=case.step_s)
    fleet.run()
    ended = [journey for journey in fleet.journeys if not journey.failed]
    cached = sum(journey.cached_tokens for journey in ended)
    best = ideal(load_of(case.load, requests, 16 if case.load in ("chats", "agents") else 64))
    ttft_s, itl_s = percentiles([journey.ttft_s for journey in ended]), percentiles(gaps.all_s)
    return TuningRow(
        table=case.table,
        load=case.load,
        setting=case.setting,
        hit_rate=cached / best.prompt_tokens,
        of_ideal=cached / best.cached_tokens if best.cached_tokens else 1.0,
        ttft_p50_ms=1000 * ttft_s.p50,
        ttft_p90_ms=1000 * ttft_s.p90,
        itl_p50_ms=1000 * itl_s.p50,
        itl_p99_ms=1000 * itl_s.p99,
        tokens_per_s=sum(journey.request.output_tokens for journey in ended) / fleet.clock.now_s,
    )


def tables(rows: Sequence[TuningRow]) -> dict[str, str]:
    """Return the tables by their names, in Markdown."""
    found = dict[str, str]()
    for name in dict.fromkeys(row.table for row in rows):
        lines = [
            f"| load | {name} | hits | first token p50, ms | p90 | between tokens p50, ms | p99 | tokens/s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row.load} | {row.setting} | {row.hit_rate:.1%} | {row.ttft_p50_ms:,.0f} | {row.ttft_p90_ms:,.0f} "
            f"| {row.itl_p50_ms:.1f} | {row.itl_p99_ms:,.0f} | {row.tokens_per_s:,.0f} |"
            for row in rows
            if row.table == name
        ]
        found[name] = "\n".join(lines)
    return found


def main() -> None:
    """Print all tables, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests in place of {REQUESTS}")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures do not depend on it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args()
    requests = QUICK_REQUESTS if flags.quick else REQUESTS
    with ProcessPoolExecutor(flags.jobs) as pool:
        rows = list(pool.map(run_case, [(case, requests) for case in cases()]))
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report("tuning", sys.argv[1:], [], rows))).decode())
        return
    for name, text in tables(rows).items():
        print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
