"""What does a router need as its fleet grows, and what gives way first?

One process, the router's own deciders, and the messages as NATS brings them: cards of N workers, indexes with 20,000
(block, worker) pairs for each, load reports of all of them four times a second, and 20 selects a second. Prompts have
512 hashes, of which the first 256 to 511 are known. Each select is reserved, prefilled and finished.

    select, p50 and p99         seconds in the process, without NATS
    a second of the router      CPU of 4 N reports (decode and apply), 20 selects with their events, the watch over N
                                workers, and storing 100 blocks for each
    memory                      of the whole process, after the fill
    fill                        CPU of learning all pairs, which a router that starts needs
    reports                     bytes of load reports that each router gets from NATS

and at 16 workers a select next to 4,096 prompts that wait, each of a priority of its own.

The last column divides a second's CPU by one: above 1 the router cannot keep up, and the models must have routers of
their own.

What could mislead: the process does nothing else, so caches are warmer than in service; the pairs are of chains that
each have 15 holders, as in the benchmark `index`.

    python -m benchmarks.scale [--quick] [--json]
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import msgspec

from benchmarks.index_workload import draw_hashes
from benchmarks.report import Goal, report
from services.router.config import IndexConfig, LoadConfig, RouterConfig
from services.router.index.kv_events import ENGINE_HASH_BITS, RemovedEvent, StoredEvent, shortened
from services.router.selection.left_out import LeftOutWorkers
from services.router.selection.model_router import ModelRouter
from services.router.selection.policy import BUILT_IN
from shared.hashing import pack_hashes, sequence_hashes
from shared.messages.cards import Instance, KvLayout, ModelCard
from shared.messages.load import LOAD_REPORT, KvState, LoadReport
from shared.messages.select import SELECT, Finished, Prefilled, Select, Selected

SIZES = ((64, 1), (250, 1), (1000, 1), (1000, 100))
"""Workers, and models over which they are spread."""
PAIRS_EACH = 20_000
DEPTH, HOLDERS, BLOCK_SIZE, EVENT_BLOCKS = 1024, 15, 16, 20
PLAIN = (BLOCK_SIZE, 0, None, False, "", "")
"""What events say of blocks of text on the device."""
PROMPT_BLOCKS = 512
SELECTS_A_SECOND, REPORTS_A_SECOND, BLOCKS_A_SECOND = 20, 4, 100
RUNNING = 16
"""Attempts in each worker's report."""
QUEUE, SELECTS_BESIDE = 4096, 400
"""Waiting prompts, each of a priority of its own, at 16 workers; and selects next to them."""
SELECT_GOAL_MS, MEMORY_GOAL_GB, BESIDE_GOAL_US = 5.0, 2.0, 60.0
LIMIT_BYTES = 1 << 40
Row = dict[str, Any]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="two seconds of traffic in place of ten")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, nargs=2, metavar=("WORKERS", "MODELS"), help="this size alone")
    flags = parser.parse_args()
    seconds = 2 if flags.quick else 10
    if flags.size is not None:
        print(msgspec.json.encode(_measured(flags.size[0], flags.size[1], seconds)).decode())
        return 0
    rows = [_in_own_process(workers, models, flags.quick) for workers, models in SIZES]
    beside_us = 1e6 * _Fleet(16, 1).queue(Random(3).sample(range(QUEUE), QUEUE))
    if flags.json:
        last = rows[-2]
        p99_ms, memory_gb = last["select p99 ms"], last["memory GB"]
        goals = [
            Goal(f"select p99, {last['workers']} workers", p99_ms, "ms", SELECT_GOAL_MS, p99_ms <= SELECT_GOAL_MS),
            Goal(f"{last['pairs'] / 1e6:.0f} M pairs", memory_gb, "GB", MEMORY_GOAL_GB, memory_gb <= MEMORY_GOAL_GB),
            Goal(f"select next to {QUEUE} priorities", beside_us, "us", BESIDE_GOAL_US, beside_us <= BESIDE_GOAL_US),
        ]
        print(msgspec.json.encode(report("scale", sys.argv[1:], goals, rows)).decode())
        return 0
    for row in rows:
        print("  ".join(f"{name} {value:,.3g}" for name, value in row.items()))
    print(f"select next to {QUEUE} priorities: {beside_us:.0f} us")
    return 0


def _in_own_process(workers: int, models: int, quick: bool) -> Row:
    """Measure one size in a process whose memory is its own."""
    size = ["--size", str(workers), str(models), *(["--quick"] if quick else [])]
    command = [sys.executable, "-m", "benchmarks.scale", *size]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    row: Row = msgspec.json.decode(done.stdout)
    return row


def _measured(workers: int, models: int, seconds: int) -> Row:
    before_kb, began_s = _resident_kb(), time.process_time()
    fleet = _Fleet(workers, models)
    fill_s = time.process_time() - began_s
    filled_kb = _resident_kb()
    selects_s: list[float] = []
    cpu_s = {part: [] for part in ("reports", "selects", "watch", "events")}  # type: dict[str, list[float]]
    for second in range(seconds):
        for part, work in (
            ("reports", fleet.report),
            ("selects", lambda: selects_s.extend(fleet.ask())),
            ("watch", fleet.watch),
            ("events", fleet.store),
        ):
            began_s = time.process_time()
            fleet.now_s = float(second)
            work()
            cpu_s[part].append(time.process_time() - began_s)
    spent = {part: median(each) for part, each in cpu_s.items()}
    return {
        "workers": workers,
        "models": models,
        "pairs": sum(router.index.statistics().pairs["device"] for router in fleet.routers),
        "fill s": fill_s,
        "select p50 ms": 1e3 * median(selects_s),
        "select p99 ms": 1e3 * quantiles(selects_s, n=100)[98],
        **{f"{part} ms/s": 1e3 * each for part, each in spent.items()},
        "memory GB": filled_kb / 1e6,
        "of that before GB": before_kb / 1e6,
        "reports MB/s": REPORTS_A_SECOND * sum(map(len, fleet.reports)) / 1e6,
        "a second": sum(spent.values()),
    }


class _Fleet:
    """A router's view of many workers, and what they send."""

    def __init__(self, workers: int, models: int) -> None:
        self.now_s = 0.0
        self._draw = Random(7)
        limits = IndexConfig(limit_bytes=LIMIT_BYTES)
        config = RouterConfig(index=limits, load=LoadConfig(frozen_s=1e6))
        self.routers = [ModelRouter(f"m{n}", "r1", config, BUILT_IN["kv"](), Random(1)) for n in range(models)]
        layout = KvLayout("bfloat16", 32, 8, 128, BLOCK_SIZE)
        self._names = [f"{number:016x}" for number in range(workers)]
        for number, name in enumerate(self._names):
            router = self.routers[number % models]
            card = ModelCard(router.model, name, "/m", "0" * 64, "0", 1 << 17, 1 << 32, BLOCK_SIZE, PAIRS_EACH, layout)
            router.add_card(card)
        self._instances = [Instance("ns", "worker", name, 1, "m", 1, 0.0, "0") for name in self._names]
        self._left_out = LeftOutWorkers()
        self._cards = [(router.model, name) for router in self.routers for name in router.cards]
        self._asked = 0
        self._prompts = [list(self._fill(router, workers * PAIRS_EACH // models)) for router in self.routers]
        attempts = [(f"{number:032x}", 1) for number in range(RUNNING)]
        self.reports = [
            LOAD_REPORT.encode(
                LoadReport(name, 1, 1, 0, RUNNING, 0, PAIRS_EACH, 32, 32, kv=[KvState(0, 1, 9)], attempts=attempts)
            )
            for name in self._names
        ]
        gc.collect()
        gc.freeze()

    def _fill(self, router: ModelRouter, pairs: int) -> Iterator[list[int]]:
        """Store chains of DEPTH blocks, each at HOLDERS workers to a random depth; yield the hashes of some of them."""
        draw, names = self._draw, list(router.cards)
        holders = min(HOLDERS, len(names))
        for number in range(pairs * 2 // (DEPTH * holders)):
            tokens = draw.randbytes(4 * BLOCK_SIZE * DEPTH)
            for name in draw.sample(names, holders):
                self._hold(router, name, draw_hashes(draw, draw.randrange(1, DEPTH + 1)), tokens)
            if not number % 16:
                yield sequence_hashes(tokens, BLOCK_SIZE)

    def _hold(self, router: ModelRouter, name: str, own: list[int], tokens: bytes) -> None:
        """Store the first blocks of a chain at a worker, as its events do; `own` are the engine's names of them."""
        for start in range(0, len(own), EVENT_BLOCKS):
            known = shortened(own[start : start + EVENT_BLOCKS])
            part = tokens[4 * BLOCK_SIZE * start : 4 * BLOCK_SIZE * (start + len(known))]
            router.caches.chains[name, 0].apply(
                StoredEvent(known, own[start - 1] & ENGINE_HASH_BITS if start else None, part, *PLAIN, len(known))
            )

    def report(self) -> None:
        """Apply a second's load reports."""
        for _ in range(REPORTS_A_SECOND):
            for payload in self.reports:
                message = LOAD_REPORT.decode(payload)
                for router in self.routers:
                    router.apply_load_report(message, self.now_s)

    def ask(self) -> list[float]:
        """Answer a second's selects, with their events. Return the seconds of each choice."""
        spent_s = []
        for _ in range(SELECTS_A_SECOND):
            self._asked += 1
            request, known = f"{self._asked:032x}", self._draw.randrange(256, PROMPT_BLOCKS)
            number = self._draw.randrange(len(self.routers))
            router = self.routers[number]
            hashes = self._draw.choice(self._prompts[number])[:known] + draw_hashes(self._draw, PROMPT_BLOCKS - known)
            ask = Select(request, 1, "f", router.model, pack_hashes(hashes), BLOCK_SIZE * PROMPT_BLOCKS + 1, 128)
            payload = SELECT.encode(ask)
            began_s = time.perf_counter()
            reply = router.select(SELECT.decode(payload), self.now_s).reply
            spent_s.append(time.perf_counter() - began_s)
            assert isinstance(reply, Selected)
            router.apply_load_event(Prefilled(request, 1, 0), self.now_s)
            router.apply_load_event(Finished(request, 1), self.now_s)
        return spent_s

    def watch(self) -> None:
        """Do a second's work that depends on time."""
        for _ in range(10):
            for router in self.routers:
                router.tick(self.now_s)
        loads = {router.model: router.loads() for router in self.routers}
        self._left_out.look(self.now_s, self._instances, self._cards, {}, loads)

    def store(self) -> None:
        """Apply a second's new blocks, and their removal."""
        for number, name in enumerate(self._names):
            router = self.routers[number % len(self.routers)]
            for _ in range(BLOCKS_A_SECOND // EVENT_BLOCKS):
                own, tokens = draw_hashes(self._draw, EVENT_BLOCKS), self._draw.randbytes(4 * BLOCK_SIZE * EVENT_BLOCKS)
                self._hold(router, name, own, tokens)
                router.caches.chains[name, 0].apply(RemovedEvent(shortened(own), 0, None))

    def queue(self, priorities: list[int]) -> float:
        """Reserve a short prompt at each of these priorities. Return the median seconds of a choice next to them."""
        (router,) = self.routers
        spent_s = []
        for number, priority in enumerate([*priorities, *self._draw.choices(priorities, k=SELECTS_BESIDE)]):
            request, hashes = f"{number:032x}", pack_hashes(draw_hashes(self._draw, 1))
            payload = SELECT.encode(
                Select(request, 1, "f", router.model, hashes, BLOCK_SIZE + 1, 128, priority=priority)
            )
            began_s = time.perf_counter()
            assert isinstance(router.select(SELECT.decode(payload), self.now_s).reply, Selected)
            spent_s.append(time.perf_counter() - began_s)
            if number >= len(priorities):
                router.apply_load_event(Finished(request, 1), self.now_s)
        return median(spent_s[len(priorities) :])


def _resident_kb() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    sys.exit(main())
