"""Does memory stay flat? Two hours of a real trace through one router and four workers, in virtual time.

The Mooncake conversation trace at its own pace, twice, the second time with other prompts, so that all that was cached
in the first hour must be forgotten in the second. Every ten minutes a worker dies in the middle of its work, and half a
minute later another joins. `services/virtual` says what is real and what is a model.

rss          of the process, once a virtual minute. Goal: within 5 % over the second hour.
grown        the same, less the RSS before the first request; the requests themselves are loaded before that.
bytes a pair the size of the router's index, by its own estimate (`benchmarks/index.py` checks it), over its (block,
             worker) pairs; the fewer workers share a block, the larger it is.

What could mislead: two hours take a minute or two, so a leak by the wall clock does not show. One process holds the
router and all engines, so a leak of the router alone is small compared with the engines (its own sizes are in the
rows). The servers and sockets of a real deployment are missing.

    python -m benchmarks.soak --trace conversation_trace.jsonl [--quick] [--json] [--plot FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.process_costs import rss_bytes
from benchmarks.report import Goal, report
from benchmarks.trace import WORKER_BLOCKS, default_timing
from services.virtual.fleet import SimulatedFleet
from services.virtual.loads import LoadTrace, read_trace
from services.worker.contracts.messages import Snapshot, TakeEngineSnapshot

WORKERS = 4
MINUTE_S = 60.0
DEATH_S = 600.0
JOIN_AFTER_S = 30.0
QUICK_REQUESTS = 2000
FLAT_GOAL = 0.05
_OTHER_NAMES = 1 << 20


class SoakRow(Struct, frozen=True):
    """The state after one virtual minute."""

    minute: int
    rss_bytes: int
    workers: int
    index_blocks: int
    index_pairs: int
    index_bytes: int
    bytes_a_pair: float
    reservations: int
    ended: int


class Soak:
    """One run of the fleet, with its samples."""

    def __init__(self, load: LoadTrace) -> None:
        self.fleet = SimulatedFleet(load, "kv", capacity_blocks=WORKER_BLOCKS)
        self.rows: list[SoakRow] = []
        self.deaths = 0
        for request in load.requests:  # what is kept for the benchmark's own use is kept from the start
            self.fleet.prompts.hashes(request)
        for _ in range(WORKERS):
            self.fleet.join(default_timing())
        gc.collect()
        self.before_bytes = rss_bytes(os.getpid())
        minutes = int(load.requests[-1].arrival_s // MINUTE_S)
        for minute in range(1, minutes + 1):
            self.fleet.clock.at(minute * MINUTE_S, partial(self._sample, minute))
        for death in range(1, int(minutes * MINUTE_S // DEATH_S)):
            self.fleet.clock.at(death * DEATH_S, self._die)
            self.fleet.clock.at(death * DEATH_S + JOIN_AFTER_S, self._join)

    def run(self) -> None:
        """Run. Raises AssertionError if the router's state is wrong at the end, or a reservation is left."""
        self.fleet.run()
        settled_s = self.fleet.clock.now_s + 1.0
        while self.fleet.clock.now_s < settled_s:
            self.fleet.clock.step()
        router = self.fleet.router
        router.validate()
        held = 0
        for worker in self.fleet.workers.values():
            (snapshot,) = worker.core.handle(TakeEngineSnapshot(0), self.fleet.clock.now_s)
            assert isinstance(snapshot, Snapshot)
            held += len(snapshot.blocks)
        assert router.index.statistics().pairs["device"] == held, "the index is not what the workers hold"
        assert router.load.statistics().reservations == 0

    def _die(self) -> None:
        """Remove the oldest worker in the middle of its work."""
        self.deaths += 1
        self.fleet.leave(next(iter(self.fleet.workers)))

    def _join(self) -> None:
        self.fleet.join(default_timing())

    def _sample(self, minute: int) -> None:
        index = self.fleet.router.index.statistics()
        pairs = sum(index.pairs.values())
        self.rows.append(
            SoakRow(
                minute=minute,
                rss_bytes=rss_bytes(os.getpid()),
                workers=len(self.fleet.workers),
                index_blocks=index.blocks,
                index_pairs=pairs,
                index_bytes=index.bytes,
                bytes_a_pair=index.bytes / max(pairs, 1),
                reservations=self.fleet.router.load.statistics().reservations,
                ended=sum(journey.end_s >= 0 for journey in self.fleet.journeys),
            )
        )


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, twice")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    load = read_trace(flags.trace)
    soak = Soak(_twice(load.first(QUICK_REQUESTS) if flags.quick else load))
    soak.run()
    if flags.plot:
        _plot(soak, flags.plot)
    if flags.json:
        print(msgspec.json.encode(report("soak", sys.argv[1:], _goals(soak), soak.rows)).decode())
        return 0
    for row in soak.rows[:: max(len(soak.rows) // 12, 1)]:
        print(
            f"minute {row.minute:4}  rss {row.rss_bytes / 1e6:7.1f} MB  {row.workers} workers  "
            f"{row.index_pairs:6} pairs of {row.bytes_a_pair:3.0f} bytes  {row.reservations:3} reserved  "
            f"{row.ended:6} ended"
        )
    for goal in _goals(soak):
        print(f"{goal.name}: {goal.value:.3f} {goal.unit}{'' if goal.met else '  NOT MET'}")
    return 0


def _twice(load: LoadTrace) -> LoadTrace:
    """Return the load twice: the second time right after the first, and with other prompts."""
    later_s = load.requests[-1].arrival_s
    again = [
        replace(
            each,
            number=each.number + len(load.requests),
            arrival_s=each.arrival_s + later_s,
            names=[name + _OTHER_NAMES for name in each.names],
        )
        for each in load.requests
    ]
    return replace(load, requests=[*load.requests, *again])


def _goals(soak: Soak) -> list[Goal]:
    second = [row.rss_bytes for row in soak.rows[len(soak.rows) // 2 :]]
    spread = (max(second) - min(second)) / min(second)
    failed = sum(bool(journey.failed) for journey in soak.fleet.journeys)
    return [
        Goal("spread of rss over the second half", spread, "share", FLAT_GOAL, spread <= FLAT_GOAL),
        Goal("requests without an answer", failed, "requests", 0, failed == 0),
    ]


def _plot(soak: Soak, path: Path) -> None:
    from benchmarks.plot import Panel, draw  # matplotlib is among the development packages only

    minutes: Sequence[float] = [row.minute for row in soak.rows]
    memory = {
        "process": (minutes, [row.rss_bytes / 1e6 for row in soak.rows]),
        "grown since the first request": (minutes, [(row.rss_bytes - soak.before_bytes) / 1e6 for row in soak.rows]),
    }
    draw([Panel("Memory, a worker dying every ten minutes", "virtual minutes", "MB", memory)], path, columns=1)


if __name__ == "__main__":
    raise SystemExit(main())
