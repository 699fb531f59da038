"""Which blocks should a block store let go? Hit rates of the eviction policies, by size of the tiers.

mooncake        Mooncake's conversation trace (12,031 requests in an hour; --trace FILE; left out without it)
conversations, agents, documents, batch     made up (`eviction_loads.py`)

A request finds the longest prefix that is there, uses it, and stores the rest of its full blocks. *Hits* are found
blocks as a share of those that one unbounded store would find. Sizes are shares of all different blocks of a load.
`foresight` knows the future, lets go what is used last, and stores nothing that is used later than all that is there:
no policy can do better.

host            one tier; `leaves`: no block goes before its children
host and disk   a disk of four times the host tier. What leaves the host is written to disk: always, or (`twice`) if it
                was asked for a second time within some ten capacities of both. What is found on disk comes up to the
                host tier, and stays on disk. `written` is blocks written to disk as a share of blocks stored.

What could mislead: the store sees every request here; in service, engines' own caches answer the quickest of them. A
prompt's blocks are stored at once, and an answer's only with the next prompt. The made-up loads are made up, and the
parameters of `reuse` were chosen while looking at these generators (with other seeds) and at the trace.

    python -m benchmarks.eviction [--trace FILE] [--policies NAME …] [--quick] [--json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
from benchmarks.loads import Load, ideal, read_trace
from benchmarks.plot import Panel, draw
from benchmarks.report import Goal, report
from services.kvbm.policies import BUILT_IN, DEFAULT, named
from shared.hashing import ContentKey

SIZES = (0.01, 0.03, 0.1, 0.3)
DISK = 4
"""Times the host tier."""
NEARLY = 0.97
"""Nowhere should the default find less than this share of what LRU finds."""
Prompts = Sequence[tuple[Sequence[ContentKey], int]]
"""Of each request: its full blocks, and how many of them can be of use to it."""


class Row(Struct, frozen=True):
    """One policy, load and size."""

    load: str
    size: float
    """Of the host tier, as a share of all different blocks."""
    tiers: str
    """`host`, or `host and disk`."""
    policy: str
    leaves: bool
    admission: str
    """To disk; `always`, `twice`, or nothing without one."""
    hits: float
    """In both tiers, of the unbounded store's."""
    host_hits: float
    written: float
    block_us: float
    """CPU time of the whole simulation a block asked for: a bound on the policy's."""


class Tier:
    """What is there, and its policy."""

    def __init__(self, policy: str, capacity_blocks: int, *, leaves: bool) -> None:
        self.policy = named(policy, capacity_blocks)
        self._free = capacity_blocks
        self._leaves = leaves
        self._parents: dict[ContentKey, ContentKey | None] = {}
        self._children: dict[ContentKey, int] = {}

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._parents

    def room(self, pinned: set[ContentKey]) -> tuple[bool, ContentKey | None, ContentKey | None]:
        """Whether there is room for one more; who went for it, and the parent of that."""
        if self._free:
            self._free -= 1
            return True, None, None
        children = self._children
        if self._leaves:
            victim = self.policy.victim(lambda key: key not in pinned and not children.get(key))
        else:
            victim = self.policy.victim(lambda key: key not in pinned)
        if victim is None:
            return False, None, None
        parent = self._parents.pop(victim)
        if parent is not None:
            self._count(parent, -1)
        self.policy.gone(victim)
        return True, victim, parent

    def enter(self, key: ContentKey, parent: ContentKey | None) -> None:
        """Into room that was made; `stored` is told by the caller, in its order."""
        self._parents[key] = parent
        if parent is not None:
            self._count(parent, 1)

    def _count(self, parent: ContentKey, change: int) -> None:
        left = self._children.get(parent, 0) + change
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]


class Sightings:
    """Who was asked for twice lately, of a bounded number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._twice: OrderedDict[ContentKey, bool] = OrderedDict()

    def seen(self, key: ContentKey) -> None:
        self._twice[key] = key in self._twice
        self._twice.move_to_end(key)
        if len(self._twice) > self._most:
            self._twice.popitem(last=False)

    def twice(self, key: ContentKey) -> bool:
        return self._twice.get(key, False)


class Store:
    """A host tier, and perhaps a disk."""

    def __init__(
        self, policy: str, host_blocks: int, *, leaves: bool, disk_blocks: int = 0, admission: str = ""
    ) -> None:
        self.host = Tier(policy, host_blocks, leaves=leaves)
        self.disk = Tier(policy, disk_blocks, leaves=leaves) if disk_blocks else None
        self._sightings = Sightings(2 * (host_blocks + disk_blocks)) if admission == "twice" else None
        self.found = self.found_in_host = self.stored = self.written = 0

    def ask(self, names: Sequence[ContentKey], most: int) -> None:
        """One request: the longest prefix is used, the rest stored."""
        host, disk = self.host, self.disk
        pinned = set(names)
        if self._sightings is not None:
            for key in names:
                self._sightings.seen(key)
        length = next((at for at, key in enumerate(names) if not (key in host or (disk and key in disk))), len(names))
        self.found += min(length, most)
        self.found_in_host += sum(key in host for key in names[: min(length, most)])
        for key in reversed(names[:length]):
            if disk is not None and key in disk:
                disk.policy.used(key)
            if key in host:
                host.policy.used(key)
        new = []
        parent: ContentKey | None = None
        for at, key in enumerate(names):
            if key not in host:
                if not self._make_room(pinned):
                    break
                host.enter(key, parent)
                new.append(key)
                self.stored += at >= length
            parent = key
        for key in reversed(new):
            host.policy.stored(key)

    def _make_room(self, pinned: set[ContentKey]) -> bool:
        made, victim, parent = self.host.room(pinned)
        wanted = victim is not None and (self._sightings is None or self._sightings.twice(victim))
        if victim is not None and self.disk is not None and wanted and victim not in self.disk:
            room, _victim, _parent = self.disk.room(pinned)
            if room:
                self.disk.enter(victim, parent)
                self.disk.policy.stored(victim)
                self.written += 1
        return made


def foresight(prompts: Prompts, capacity_blocks: int) -> int:
    """How many blocks would be found, if the future were known (Belady)."""
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


def rows_of(load: Load, sizes: Sequence[float], policies: Sequence[str]) -> Iterator[Row]:
    """Every combination."""
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
        yield Row(load.name, share, "host", "foresight", True, "", hits, hits, 0.0, 0.0)
        for policy in policies:
            for disk, admission, leaves in (
                (0, "", True),
                (0, "", False),
                (DISK, "always", True),
                (DISK, "twice", True),
            ):
                if disk and share * (1 + DISK) > 1:
                    continue
                store = Store(policy, host, leaves=leaves, disk_blocks=disk * host, admission=admission)
                began_s = process_time()
                for keys, most in prompts:
                    store.ask(keys, most)
                took_us = 1e6 * (process_time() - began_s) / asked
                hits, in_host = store.found / best, store.found_in_host / best
                written = store.written / store.stored
                tiers = "host and disk" if disk else "host"
                yield Row(load.name, share, tiers, policy, leaves, admission, hits, in_host, written, took_us)


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--policies", nargs="+", default=list(BUILT_IN), help="by name or module:attribute")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests, two sizes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    rows = []
    for load in _loads(flags.trace, quick=flags.quick):
        for row in rows_of(load, SIZES[1:3] if flags.quick else SIZES, flags.policies):
            rows.append(row)
            if not flags.json:
                print(_line(row), flush=True)
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


def _loads(trace: Path | None, *, quick: bool) -> Iterator[Load]:
    part = 5 if quick else 1
    if trace is not None:
        load = read_trace(trace)
        yield load.first(len(load.requests) // part)
    for seed, make in enumerate((conversations, agents, documents, batch), start=101):
        yield make(5000 // part, Random(seed))


def _line(row: Row) -> str:
    kind = f"{row.tiers} {row.admission}" if row.admission else f"host{'' if row.leaves else ', any order'}"
    return (
        f"{row.load:14}{row.size:6.0%}  {row.policy:10}{kind:22}{row.hits:7.1%} of the hits"
        f" {row.host_hits:7.1%} in host {row.written:7.1%} written {row.block_us:6.1f} µs a block"
    )


def _goals(rows: Sequence[Row], *, trace: bool) -> list[Goal]:
    """The default is the best of all over all loads and sizes, and nowhere much worse than LRU. Without the trace no
    goal is met."""
    goals = []
    kinds = {"one tier": ("host", ""), "two tiers": ("host and disk", "twice")}
    for kind, (tiers, admission) in kinds.items():
        of_kind = [row for row in rows if row.tiers == tiers and row.admission == admission and row.leaves]
        found = {(row.policy, row.load, row.size): row.hits for row in of_kind if row.policy != "foresight"}
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
    twice = [row for row in rows if row.admission == "twice" and row.policy == DEFAULT]
    always = [row for row in rows if row.admission == "always" and row.policy == DEFAULT]
    if twice:
        kept = fmean(row.hits for row in twice) / fmean(row.hits for row in always)
        goals.append(_goal("hits with admission by seen twice, times always's", kept, NEARLY, trace))
        less = fmean(row.written for row in always) / fmean(row.written for row in twice)
        goals.append(_goal("blocks written to disk always, times those by seen twice", less, 2.0, trace))
    return goals


def _goal(name: str, value: float, least: float, trace: bool) -> Goal:
    return Goal(name, round(value, 4), "", round(least, 4), trace and value >= least)


def _draw(rows: Sequence[Row], path: Path) -> None:
    panels = []
    for load, found in groupby(rows, key=lambda row: row.load):
        host = [row for row in found if row.tiers == "host" and row.leaves]
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
