"""Which blocks should a block store evict? Hit rates of the eviction policies, by size of the tiers.

mooncake        Mooncake's conversation trace (12,031 requests in an hour; --trace FILE; left out without it)
conversations, agents, documents, batch     made up (`eviction_loads.py`)

A request uses the longest prefix that the store has, and stores the rest of its full blocks. *Hits* are found blocks
as a share of those that one unbounded store would find. Sizes are shares of all different blocks of a load. `foresight`
knows the future: it evicts the block whose next use is last, and does not store a block whose next use is later still.
No policy can do better.

host            one tier
host and disk   a disk of four times the host tier, written to when a block was seen a second time (`twice`), also
                while records are free (`filled`, the default), or always (`all`). A block found on disk is copied to
                the host tier and stays on disk. `written` is blocks written to disk as a share of blocks stored.

The tiers are the store's own (`services/kvbm/tiers/tiers.py`); copies and the disk take no time, and nothing fails.

What could mislead: the store sees every request here; in service, engines' own caches answer the quickest of them. A
prompt's blocks are stored at once, and an answer's only with the next prompt. The made-up loads are made up, and the
parameters of `reuse` were chosen while looking at these generators (with other seeds) and at the trace. Loads end soon
after the disk is full, or before: over weeks `filled` is nearer to `twice`, in hits as in writes.

    python -m benchmarks.eviction [--trace FILE] [--policies NAME …] [--quick] [--json] [--plot FILE.png] [--jobs N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from itertools import groupby
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean
from time import process_time

import msgspec
from msgspec import Struct

from benchmarks.eviction_loads import agents, batch, conversations, documents
from benchmarks.plot import Panel, draw
from benchmarks.report import Goal, report
from services.kvbm.tiers.actions import TierSizes
from services.kvbm.tiers.policies import BUILT_IN, DEFAULT, DISK_DEFAULT, make_policy
from services.kvbm.tiers.tiers import Tiers
from services.virtual.loads import LoadTrace, ideal, read_trace
from shared.blocks import Content
from shared.hashing import ContentKey

SIZES = (0.01, 0.03, 0.1, 0.3)
DISK = 4
"""The disk's size as a multiple of the host tier's."""
ADMISSIONS = ("twice", "filled", "all")
NEARLY = 0.97
"""The default should find at least this share of what LRU finds, everywhere."""
Prompts = Sequence[tuple[Sequence[ContentKey], int]]
"""The full blocks of each request, and how many of them it can use."""


class EvictionRow(Struct, frozen=True):
    """The result of one policy at one load and size."""

    load: str
    size: float
    """The host tier's size, as a share of all different blocks."""
    tiers: str
    """Either `host`, or `host and disk`."""
    policy: str
    """The host tier's policy."""
    disk_policy: str
    admission: str
    """The admission to disk: `twice`, `filled` or `all`; empty without a disk."""
    hits: float
    """The hits in both tiers, as a share of the unbounded store's."""
    host_hits: float
    written: float
    block_us: float
    """The simulation's CPU time for each requested block: an upper bound of the policy's."""


class TieredStore:
    """Both tiers, with an engine that makes each allowed copy at once."""

    def __init__(self, host_policy: str, disk_policy: str, sizes: TierSizes) -> None:
        self._tiers = Tiers(
            sizes, make_policy(host_policy, sizes.slots), make_policy(disk_policy, max(1, sizes.records))
        )
        if sizes.records:
            self._tiers.disk_ready([])
        self.found = self.found_in_host = self.stored = self.written = 0

    def ask(self, keys: Sequence[ContentKey], most: int) -> None:
        """Simulate a request: use the longest prefix, at most `most` blocks of it, and store the rest."""
        tiers = self._tiers
        held = tiers.fetch(keys)
        found = len(held.slots)
        self.found += min(found, most)
        self.found_in_host += min(found, most) - sum(index < most for index in held.loading)
        for read in held.reads:
            tiers.read_done(read, "ok")
        tiers.release(held.slots)
        parents = [None, *keys]
        offered = tiers.offer([Content(keys[at], parents[at], b"") for at in range(found, len(keys))], len(keys))
        tiers.publish(offered.slots)
        self.stored += len(offered.slots)
        spills, _ = tiers.take_spills(sys.maxsize)
        for spill in spills:
            tiers.spill_done(spill, "ok")
        self.written += len(spills)


def foresight(prompts: Prompts, capacity_blocks: int) -> int:
    """Count the blocks that a policy which knows the future would find (Belady)."""
    next_use: list[list[float]] = []
    last: dict[ContentKey, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        names = prompts[number][0]
        next_use.append([last.get(key, inf) for key in names])
        last.update(dict.fromkeys(names, number))
    next_use.reverse()
    there: dict[ContentKey, float] = {}
    latest: list[tuple[float, ContentKey]] = []
    found = 0
    for (names, most), uses in zip(prompts, next_use, strict=True):
        found += min(next((at for at, key in enumerate(names) if key not in there), len(names)), most)
        for key, use in zip(names, uses, strict=True):
            there.pop(key, None)
            if use < inf:
                there[key] = use
                heappush(latest, (-use, key))
        while len(there) > capacity_blocks:
            use, key = heappop(latest)
            if there.get(key) == -use:
                del there[key]
    return found


def rows_of(load: LoadTrace, sizes: Sequence[float], policies: Sequence[str]) -> Iterator[EvictionRow]:
    """Measure every combination of sizes and policies on one load."""
    size = load.block_size
    prompts: list[tuple[Sequence[ContentKey], int]] = []
    for each in load.requests:
        blocks: Sequence[ContentKey] = [name.to_bytes(16) for name in each.names[: each.prompt_tokens // size]]
        prompts.append((blocks, (each.prompt_tokens - 1) // size))
    best = ideal(load).cached_blocks
    asked = sum(len(keys) for keys, _most in prompts)
    different = len({key for keys, _most in prompts for key in keys})
    for share in sizes:
        host = max(1, round(share * different))
        hits = foresight(prompts, host) / best
        yield EvictionRow(load.name, share, "host", "foresight", "", "", hits, hits, 0.0, 0.0)
        both = share * (1 + DISK) <= 1
        for policy, disk_policy, admission in _combinations(policies, both):
            records = DISK * host if admission else 0
            sizes_of = TierSizes(
                slots=host,
                records=records,
                disk_sightings=1 if admission == "all" else 2,
                fill_disk=admission == "filled",
                held_share=1.0,
            )
            store = TieredStore(policy, disk_policy, sizes_of)
            began_s = process_time()
            for keys, most in prompts:
                store.ask(keys, most)
            took_us = 1e6 * (process_time() - began_s) / asked
            yield EvictionRow(
                load=load.name,
                size=share,
                tiers="host and disk" if admission else "host",
                policy=policy,
                disk_policy=disk_policy if admission else "",
                admission=admission,
                hits=store.found / best,
                host_hits=store.found_in_host / best,
                written=store.written / store.stored,
                block_us=took_us,
            )


def _combinations(policies: Sequence[str], both: bool) -> Iterator[tuple[str, str, str]]:
    """Yield host policy, disk policy and admission; `both` adds disks."""
    for policy in policies:
        yield policy, DISK_DEFAULT, ""
        if both:
            yield from ((policy, DISK_DEFAULT, admission) for admission in ADMISSIONS)
    if both:
        yield DEFAULT, DEFAULT, "filled"


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--policies", nargs="+", default=list(BUILT_IN), help="by name or module:attribute")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests, two sizes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes; hits and writes do not depend on it")
    flags = parser.parse_args()
    sizes = SIZES[1:3] if flags.quick else SIZES
    parts = [(load, size, flags.policies) for load in _loads(flags.trace, quick=flags.quick) for size in sizes]
    rows = []
    with ProcessPoolExecutor(flags.jobs) as pool:
        for found in pool.map(_part, parts):
            rows += found
            if not flags.json:
                print(*map(_line, found), sep="\n", flush=True)
    goals = _goals(rows, trace=flags.trace is not None)
    if flags.plot is not None:
        _draw(rows, flags.plot)
    if flags.json:
        print(
            msgspec.json.format(msgspec.json.encode(report("eviction", sys.argv[1:], goals, rows)), indent=1).decode()
        )
    else:
        print("\n".join(f"{goal.name}: {goal.value} (goal {goal.goal})" for goal in goals))
    return 0


def _part(part: tuple[LoadTrace, float, Sequence[str]]) -> list[EvictionRow]:
    load, size, policies = part
    return list(rows_of(load, (size,), policies))


def _loads(trace: Path | None, *, quick: bool) -> Iterator[LoadTrace]:
    part = 5 if quick else 1
    if trace is not None:
        load = read_trace(trace)
        yield load.first(len(load.requests) // part)
    for seed, make in enumerate((conversations, agents, documents, batch), start=101):
        yield make(5000 // part, Random(seed))


def _line(row: EvictionRow) -> str:
    tiers = f"and disk ({row.disk_policy}), {row.admission}" if row.admission else ""
    return (
        f"{row.load:14}{row.size:6.0%}  {row.policy:10}{tiers:26}{row.hits:7.1%} of the hits"
        f" {row.host_hits:7.1%} in host {row.written:7.1%} written {row.block_us:6.1f} µs a block"
    )


def _goals(rows: Sequence[EvictionRow], *, trace: bool) -> list[Goal]:
    """Require that the default is the best policy over all loads and sizes, and nowhere much worse than LRU.

    Without the trace no goal is met.
    """
    goals = []
    for kind, admission in (("one tier", ""), ("two tiers", "filled")):
        of_kind = [row for row in rows if row.admission == admission]
        of_kind = [row for row in of_kind if row.disk_policy in ("", DISK_DEFAULT)]
        found = {(row.policy, row.load, row.size): row.hits for row in of_kind}
        means = {policy: fmean(hits for (whose, *_), hits in found.items() if whose == policy) for policy, *_ in found}
        mine = means.pop(DEFAULT, None)
        if mine is None or "lru" not in means:
            continue
        parts = [hits / found["lru", load, size] for (policy, load, size), hits in found.items() if policy == DEFAULT]
        goals.append(
            _goal(f"{kind}: mean hits of {DEFAULT}, beside the best other's", mine, max(means.values()), trace)
        )
        goals.append(_goal(f"{kind}: mean hits of {DEFAULT}, times LRU's", fmean(parts), 1.0, trace))
        goals.append(_goal(f"{kind}: worst hits of {DEFAULT}, times LRU's", min(parts), NEARLY, trace))
    admitted = {
        admission: [row for row in rows if row.admission == admission and row.disk_policy == DISK_DEFAULT]
        for admission in ADMISSIONS
    }
    mine_of = {name: [row for row in found if row.policy == DEFAULT] for name, found in admitted.items()}
    if all(mine_of.values()):
        hits = {name: fmean(row.hits for row in found) for name, found in mine_of.items()}
        written = {name: fmean(row.written for row in found) for name, found in mine_of.items()}
        for name in ("twice", "filled"):
            kept = hits[name] / hits["all"]
            goals.append(_goal(f"hits with admission `{name}`, times `all`'s", kept, NEARLY, trace))
        less = written["all"] / written["twice"]
        goals.append(_goal("blocks written to disk with `all`, times those with `twice`", less, 2.0, trace))
        less = written["all"] / written["filled"]
        goals.append(_goal("blocks written to disk with `all`, times those with `filled`", less, 1.5, trace))
    return goals


def _goal(name: str, value: float, least: float, trace: bool) -> Goal:
    return Goal(name, round(value, 4), "", round(least, 4), trace and value >= least)


def _draw(rows: Sequence[EvictionRow], path: Path) -> None:
    panels = []
    for load, found in groupby(rows, key=lambda row: row.load):
        host = [row for row in found if row.tiers == "host"]
        curves: Mapping[str, tuple[list[float], list[float]]] = {
            name: (
                [100 * row.size for row in host if row.policy == name],
                [row.hits for row in host if row.policy == name],
            )
            for name in dict.fromkeys(row.policy for row in host)
        }
        panels.append(Panel(load, "host tier, % of all different blocks", "hits, of an unbounded store's", curves))
    draw(panels, path, columns=3)


if __name__ == "__main__":
    raise SystemExit(main())
