"""How fast does a router answer over NATS, at 64 instances and a million (block, instance) pairs?

    core 1:  the asker ── Select ──▶ nats-server ──▶  core 0: the router
             64 scripted workers: cards, snapshots, load reports, events ──▶

The router is the real process; so are NATS, ZMQ, the files of discovery and the asker's bus. The million pairs come by
the workers' snapshots. Prompts have 512 hashes: the first 256 to 511 blocks of a known prompt, and then new ones.
Every choice is reserved, sent to the other routers, prefilled and finished, and the workers report four times a second,
as in service.

Saturation is a closed loop. The open loop asks at random (Poisson) times at half that rate, and each answer is timed
from when its question was due: this includes the asker's own Python, the server, and waiting for one another. The third
row has 10,000 blocks a second stored and removed meanwhile. The last one asks one question after another: it shows what
a question adds to the first token of a request that is alone.

What could mislead: with fewer than two cores, or other work on the machine, asker, server and router wait for one
another, and the percentiles are the scheduler's. Compare runs by the router's CPU time a select; it includes events,
reports and gauges. The scripted workers never confirm their requests by events. So expected blocks stay in the index
for all of their five seconds: 10,000 runs and more, while a real fleet of this size has hundreds.

    python -m benchmarks.route [--quick] [--json] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from benchmarks.report import ROOT, Goal, report
from benchmarks.route_load import BLOCK_SIZE, CHAINS, DEPTH, MODEL, NAMESPACE, chains
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig, environment
from shared.discovery.file import FileDiscovery
from shared.errors import Unavailable
from shared.hashing import self_test, sequence_hashes
from shared.messages.cards import INSTANCE, MODEL_CARD, EventSource, Instance, KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import (
    EVENT_BATCH,
    SNAPSHOT_CHUNK,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    SnapshotBlock,
    SnapshotChunk,
)
from shared.messages.load import LOAD_REPORT, KvState, LoadReport
from shared.messages.people import ROUTER_STATE, RouterState
from shared.messages.select import LOAD_EVENTS, RESERVATIONS_REQUEST, Finished, ReservationsRequest, Reserved
from tests.servers import NatsServer

INSTANCES = 64
HOLDERS = 15
REPORT_S = 0.25
CHUNK_BLOCKS = 4096
BURST_BLOCKS = 64
EVENTS_BLOCKS_A_SECOND = 10_000
LOAD_LIMIT_S = 120.0
P50_GOAL_MS, P99_GOAL_MS, SATURATION_GOAL = 0.5, 2.0, 3000.0
ALONE_GOAL_MS = 1.0
"""The goal of one question alone: a third of the time that a request may wait outside its engine."""


class RoutedWorker:
    """An instance without an engine. It holds given blocks and reports the router's requests."""

    def __init__(self, name: str, bus: NatsBus, events: ZmqEventBus) -> None:
        self.name = name
        self.blocks: list[SnapshotBlock] = []
        self.attempts: set[tuple[str, int]] = set()
        self._bus = bus
        self._publisher = events.open_publisher()
        self._sequence = -1
        self._progress = 0

    def holds(self, chain: bytes, hashes: Sequence[int], depth: int) -> None:
        """Store the first `depth` blocks of a chain."""
        stride = 4 * BLOCK_SIZE
        for number in range(depth):
            tokens = chain[number * stride : (number + 1) * stride]
            self.blocks.append(SnapshotBlock(hashes[number], hashes[number - 1] if number else None, tokens))

    def tells(self, event: KvEvent) -> None:
        """Send a KV event on the event stream."""
        self._sequence += 1
        self._publisher.publish(self._sequence, EVENT_BATCH.encode(EventBatch(0.0, [event], 0)))

    async def snapshot(self, message: Message) -> None:
        """Answer with a snapshot of all blocks."""
        for start in range(0, max(len(self.blocks), 1), CHUNK_BLOCKS):
            last = start + CHUNK_BLOCKS >= len(self.blocks)
            chunk = SnapshotChunk(1, self._sequence, self.blocks[start : start + CHUNK_BLOCKS], last)
            headers = {LAST_HEADER: "true"} if last else None
            await self._bus.publish(message.reply, SNAPSHOT_CHUNK.encode(chunk), headers=headers)

    async def report(self) -> None:
        """Send a load report, as workers do four times a second."""
        self._progress += 1
        report = LoadReport(
            *(
                self.name,
                1,
                self._progress,
                0,
                len(self.attempts),
                0,
                20_000,
                32 * len(self.attempts),
                len(self.blocks),
            ),
            kv=[KvState(0, 1, self._sequence)],
            attempts=list(self.attempts),
        )
        await self._bus.publish(subjects.worker(NAMESPACE, self.name, "load"), LOAD_REPORT.encode(report))

    def entries(self, epoch: int) -> dict[str, bytes]:
        """Return the entries of the address and of the model card."""
        source = self._publisher.source
        stream = EventSource(source.publish, source.replay, source.topic, source.binds, epoch=True, snapshot=True)
        address = Instance(NAMESPACE, "worker", self.name, epoch, "m", 1, 0.0, "0", events=stream)
        layout = KvLayout("bfloat16", 32, 8, 128, BLOCK_SIZE)
        test = self_test(BLOCK_SIZE)
        card = ModelCard(
            *(MODEL, self.name, "/m", "0" * 64, test, 1 << 17, 1 << 17, BLOCK_SIZE, 20_000), kv_layout=layout
        )
        return {
            subjects.instance_key(NAMESPACE, "worker", self.name): INSTANCE.encode(address, JSON_HEADER),
            subjects.model_key(NAMESPACE, MODEL, self.name): MODEL_CARD.encode(card, JSON_HEADER),
        }


class RoutedFleet:
    """All scripted workers, and the router's process."""

    def __init__(self, url: str, folder: Path, bus: NatsBus, events: ZmqEventBus, known: int) -> None:
        self.url = url
        self.known = known
        """The chains that some worker has cached."""
        self._folder = folder
        self._bus = bus
        self._draw = Random(5)
        self.workers = {f"{number:016x}": RoutedWorker(f"{number:016x}", bus, events) for number in range(INSTANCES)}
        self.pairs = 0
        self.storing = False
        for chain in chains(known):
            hashes = sequence_hashes(chain, BLOCK_SIZE)
            for worker in self._draw.sample(list(self.workers.values()), HOLDERS):
                depth = self._draw.randrange(DEPTH + 1)
                worker.holds(chain, hashes, depth)
                self.pairs += depth

    async def serve(self, discovery: FileDiscovery) -> None:
        """Announce the workers in the discovery."""
        for worker in self.workers.values():
            await self._bus.subscribe(subjects.worker(NAMESPACE, worker.name, "snapshot"), worker.snapshot)
        await self._bus.subscribe(subjects.router_load(NAMESPACE, MODEL), self._load_events)
        await discovery.register(self._entries)

    def _entries(self, epoch: int) -> dict[str, bytes]:
        return {key: value for worker in self.workers.values() for key, value in worker.entries(epoch).items()}

    async def _load_events(self, message: Message) -> None:
        for event in LOAD_EVENTS.decode(message.payload).events:
            if isinstance(event, Reserved):
                self.workers[event.instance].attempts.add((event.request, event.attempt))
            elif isinstance(event, Finished):
                for worker in self.workers.values():
                    worker.attempts.discard((event.request, event.attempt))

    async def report(self) -> None:
        """Report the load of one worker after another, without end."""
        while True:
            for worker in self.workers.values():
                await worker.report()
                await asyncio.sleep(REPORT_S / INSTANCES)

    async def store(self) -> None:
        """While `storing`, store new blocks and remove as many old ones."""
        told: list[tuple[RoutedWorker, list[int | bytes]]] = []
        while True:
            await asyncio.sleep(2 * BURST_BLOCKS / EVENTS_BLOCKS_A_SECOND)
            if not self.storing:
                continue
            worker = self._draw.choice(list(self.workers.values()))
            names: list[int | bytes] = [self._draw.getrandbits(64) for _ in range(BURST_BLOCKS)]
            tokens = [self._draw.getrandbits(16) for _ in range(BURST_BLOCKS * BLOCK_SIZE)]
            worker.tells(BlockStored(names, None, tokens, BLOCK_SIZE, medium="GPU"))
            told.append((worker, names))
            if len(told) > 100:
                old, gone = told.pop(0)
                old.tells(BlockRemoved(gone, medium="GPU"))

    @asynccontextmanager
    async def router(self, core: int | None) -> AsyncIterator[int]:
        """Start a router; yield its PID once it knows all workers and blocks."""
        flags = [
            *("--namespace", NAMESPACE, "--nats-url", self.url, "--observe-log-level", "error"),
            *("--discovery-backend", "file", "--discovery-path", str(self._folder)),
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.router", *flags), env=environment(), cwd=ROOT
        )
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            name = await self._known_by_router()
            listening = asyncio.create_task(self._listen(name))
            try:
                yield process.pid
            finally:
                listening.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _listen(self, name: str) -> None:
        """Listen to reservations, as a starting router does; the workers' reports contain them."""
        question = RESERVATIONS_REQUEST.encode(ReservationsRequest(MODEL))
        while True:
            await self._bus.request(subjects.reservations(NAMESPACE, name), question, timeout_s=10.0)
            await asyncio.sleep(10.0)

    async def _known_by_router(self) -> str:
        name = ""
        async with asyncio.timeout(LOAD_LIMIT_S):
            while True:
                await asyncio.sleep(0.2)
                name = name or _router_name(self._folder)
                if not name:
                    continue
                try:
                    answer = await self._bus.request(subjects.router_state(NAMESPACE, name), b"", timeout_s=10.0)
                except Unavailable:
                    continue
                state: RouterState = ROUTER_STATE.decode(answer.payload, JSON_HEADER)
                live = sum(source.state == "live" for source in state.sources)
                if live == INSTANCES and state.models and state.models[0].instances == INSTANCES:
                    return name


def _router_name(folder: Path) -> str:
    for file in folder.glob("*.json"):
        for key in msgspec.json.decode(file.read_bytes(), type=dict[str, Any]):
            if f"/{NAMESPACE}/instances/router/" in key:
                return str(key.rpartition("/")[2])
    return ""


async def _asked(fleet: RoutedFleet, pid: int, *flags: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.route_load", "--nats-url", fleet.url, "--router-pid", str(pid)),
        *("--chains", str(fleet.known), *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the asker ended with {process.returncode}")
    return dict(json.loads(output))


async def _measure(quick: bool) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
    seconds, known = ("3", 30) if quick else ("10", CHAINS)
    with tempfile.TemporaryDirectory() as folder, ZmqEventBus("127.0.0.1") as events:
        discovered = Path(folder) / "discovery"
        discovered.mkdir()
        server = NatsServer(Path(folder))
        server.start()
        try:
            bus = await connect(NatsConfig(url=server.url), "workers")
            discovery = FileDiscovery(discovered)
            fleet = RoutedFleet(server.url, discovered, bus, events, known)
            await fleet.serve(discovery)
            loops = [asyncio.create_task(fleet.report()), asyncio.create_task(fleet.store())]
            async with fleet.router(cores[0] if len(cores) > 1 else None) as pid:
                rows: list[dict[str, Any]] = []
                full = await _asked(fleet, pid, "closed", "--in-flight", "64", "--seconds", seconds)
                rows.append({"what": "saturation: 64 in flight", "pairs": fleet.pairs, **full})
                half = f"{full['asked a second'] / 2:.0f}"
                row = await _asked(fleet, pid, "open", "--rate", half, "--seconds", seconds)
                rows.append({"what": f"open loop, {half} a second", "pairs": fleet.pairs, **row})
                fleet.storing = True
                row = await _asked(fleet, pid, "open", "--rate", half, "--seconds", seconds)
                rows.append({"what": f"the same beside {EVENTS_BLOCKS_A_SECOND:,} blocks a second", **row})
                fleet.storing = False
                row = await _asked(fleet, pid, "closed", "--in-flight", "1", "--seconds", seconds)
                rows.append({"what": "one at a time", "pairs": fleet.pairs, **row})
            for each in loops:
                each.cancel()
            await discovery.close()
            await bus.drain()
        finally:
            server.stop()
    return rows


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a ninth of the pairs, three seconds a row")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="a PNG")
    flags = parser.parse_args()
    rows = asyncio.run(_measure(flags.quick))
    if flags.plot:
        _plot(rows, flags.plot)
    if flags.json:
        command = ["--quick"] if flags.quick else []
        print(msgspec.json.encode(report("route", [*command, "--json"], _goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(row["what"])
        for name, value in row.items():
            if isinstance(value, int | float):
                print(f"    {name:<28} {value:>12,.2f}")
    for goal in _goals(rows):
        print(f"{'met' if goal.met else 'NOT met':<8} {goal.name}: {goal.value:,.2f} {goal.unit}")
    return 0


def _goals(rows: list[dict[str, Any]]) -> list[Goal]:
    full, half, alone = rows[0], rows[1], rows[3]
    core = 1e6 / full["router CPU us a select"]
    failed = sum(row["failed"] for row in rows)
    at_most = [
        ("p50 of the round trip at half the saturation rate", half["p50 ms"], "ms", P50_GOAL_MS),
        ("p99 of the round trip at half the saturation rate", half["p99 ms"], "ms", P99_GOAL_MS),
        ("p50 of the round trip, one at a time", alone["p50 ms"], "ms", ALONE_GOAL_MS),
        ("questions without a choice", failed, "questions", 0),
    ]
    at_least = [
        ("saturation", full["asked a second"], "selects a second", SATURATION_GOAL),
        ("saturation of one core", core, "selects a second of the router's CPU time", SATURATION_GOAL),
    ]
    return [Goal(name, round(value, 3), unit, goal, value <= goal) for name, value, unit, goal in at_most] + [
        Goal(name, round(value, 3), unit, goal, value >= goal) for name, value, unit, goal in at_least
    ]


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from benchmarks.plot import Panel, draw  # matplotlib is among the development packages only

    shares = [share / 2 for share in range(201)]
    curves = {
        label: (row["percentiles ms"], shares) for label, row in zip(("alone", "beside events"), rows[1:3], strict=True)
    }
    draw([Panel(rows[1]["what"], "round trip, ms", "% of answers within", curves)], path, columns=1)


if __name__ == "__main__":
    raise SystemExit(main())
