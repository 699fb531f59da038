"""What do KV events cost on their way from a worker into the router's index, on each plane, and are any lost?

A publisher in a process of its own sends new blocks in batches of 1, 8 or 64, open loop: it never waits for us. Here
they go through the same subscription that the router has, are decoded, hashed and stored. Then the same payloads are
decoded and applied again, into a fresh index and without a network: `alone`. `paced` is 50,000 blocks a second;
`burst` is all at once, up to half of what the socket holds, and so the cost of a batch without that of waking up.

The planes take turns in each round (`observe.events_plane`); `server` is the processor time of nats-server.

What could mislead: times are process CPU, the event loop and ZMQ's own thread included. `sent` is the publisher's,
which sends from its event loop (shared/bus/event_port.py); all others but `server` are the receiver's. In a burst,
`sent` does not include bytes that are still unsent when all batches are published. A paced process sleeps between
batches and then has cold caches if other programs ran meanwhile: on a busy machine that costs more than all of ZMQ.
Batches of 1 come about fifty at a time, as the publisher wakes up every millisecond; spread evenly each would cost a
wake-up. On a busy machine the publisher lags: `late` is the worst lag, and the rate is the measured one. Sockets are on
the loopback.

    python -m benchmarks.events [--quick] [--json] [--planes zmq,nats,jetstream]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from array import array
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import msgspec
import uvloop

from benchmarks.process_costs import cpu_of
from benchmarks.report import ROOT, Goal, report
from services.router.index.chains import Chains
from services.router.index.index import Index
from services.router.index.kv_events import decode
from shared.messages.cards import EventSource
from shared.messages.kv_events import EVENT_BATCH, BlockStored, EventBatch
from tests.event_planes import Plane, event_planes, with_jetstream
from tests.servers import NatsServer, nats_server

PLANES = get_args(Plane)
BLOCK_SIZE = 16
BLOCKS_PER_S = 50_000
BATCH_BLOCKS = (1, 8, 64)
CHAIN_BLOCKS = 256
BURST_BATCHES = 10_000
TICK_S = 0.001
RATIO_GOAL = 1.5
SILENCE_S = 20.0
"""How long to wait after the publisher's end; a batch that has not come by then is lost."""

Row = dict[str, Any]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="half a second a round, fewer rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--planes", default=",".join(PLANES), help="separated by commas")
    parser.add_argument("--publish", nargs=5, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.publish:
        plane, url, *numbers = flags.publish
        uvloop.run(_publish(plane, url, *map(int, numbers)))
        return 0
    planes = flags.planes.split(",")
    if set(planes) - set(PLANES):
        parser.error(f"--planes: {flags.planes}: some of {', '.join(PLANES)}")
    with TemporaryDirectory() as folder, nats_server(Path(folder), with_jetstream(Path(folder))) as nats:
        rows = list(_measure(planes, nats, *((0.5, 3) if flags.quick else (2.0, 7))))
    if flags.json:
        print(msgspec.json.encode(_report(rows)).decode())
        return 0
    for row in rows:
        shown = (f"{name} {value if isinstance(value, str) else f'{value:,.2f}'}" for name, value in row.items())
        print("   ".join(shown))
    return 0


def _measure(planes: list[str], nats: NatsServer, seconds: float, rounds: int) -> Iterator[Row]:
    for size in BATCH_BLOCKS:
        for rate in (0, BLOCKS_PER_S):
            batches = int(seconds * BLOCKS_PER_S / size)
            batches = batches if rate else min(batches, BURST_BATCHES)
            measured: dict[str, list[Row]] = {plane: [] for plane in planes}
            for _ in range(rounds):
                for plane in planes:
                    measured[plane].append(uvloop.run(_round(plane, nats, size, batches, rate)))
            for plane, found in measured.items():
                kind = {"plane": plane, "blocks a batch": size, "sent": "paced" if rate else "burst"}
                yield kind | {name: _summed(name, found) for name in found[0]}


def _summed(name: str, rounds: list[Row]) -> float:
    values: list[float] = [row[name] for row in rounds]
    if name == "batches lost":
        return sum(values)
    return round(max(values) if name == "late ms" else median(values), 3)


# --- the receiver


class _Receiver:
    """Applies events as the router's feed does, and keeps their payloads."""

    def __init__(self) -> None:
        self._chains = _chains()
        self._next = 1
        self.payloads: list[bytes] = []
        self.lost = 0
        self.joined = asyncio.Event()
        self.ended = asyncio.Event()

    def receive(self, sequence: int, payload: bytes) -> None:
        if sequence == 0:
            self.joined.set()
        elif not payload:
            if not self.ended.is_set():
                self.lost += sequence - self._next
                self.ended.set()
        else:
            self.lost += sequence - self._next
            self._next = sequence + 1
            self.payloads.append(payload)
            _apply(self._chains, payload)


async def _round(plane: str, nats: NatsServer, size: int, batches: int, rate: int) -> Row:
    command = [
        *(sys.executable, "-m", "benchmarks.events", "--publish", plane, nats.url),
        *map(str, (size, batches, rate)),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    receiver = _Receiver()
    async with event_planes("zmq", nats.url) as events:
        source = msgspec.json.decode(await process.stdout.readline(), type=EventSource)
        subscription = events.subscribe(source, receiver.receive)
        await receiver.joined.wait()
        server_s = cpu_of(nats.pid).sum_s
        began_ns = time.process_time_ns()
        process.stdin.write(b"go\n")
        told = msgspec.json.decode(await process.stdout.readline(), type=dict[str, float])
        async with asyncio.timeout(SILENCE_S):
            await receiver.ended.wait()
        spent_ns = time.process_time_ns() - began_ns
        server_s = cpu_of(nats.pid).sum_s - server_s
        subscription.close()
    process.stdin.close()
    await process.wait()
    fresh = _chains()
    began_ns = time.process_time_ns()
    for payload in receiver.payloads:
        _apply(fresh, payload)
    alone_ns = time.process_time_ns() - began_ns
    return {
        "received us": spent_ns / batches / 1e3,
        "alone us": alone_ns / batches / 1e3,
        "sent us": told["spent_s"] * 1e6 / batches,
        "server us": server_s * 1e6 / batches,
        "ratio": spent_ns / alone_ns,
        "batches lost": receiver.lost,
        "blocks a second": batches * size / told["took_s"],
        "late ms": told["late_s"] * 1e3,
    }


def _chains() -> Chains:
    return Chains(
        Index(limit_bytes=1 << 40),
        ("a", 0),
        block_size=BLOCK_SIZE,
        vocab_size=1 << 17,
        limit_blocks=10**7,
        orphan_limit_blocks=1000,
    )


def _apply(chains: Chains, payload: bytes) -> None:
    for event in decode(payload).events:
        chains.apply(event)


# --- the publisher


async def _publish(plane: Plane, nats_url: str, size: int, batches: int, rate: int) -> None:
    """Publish batches on a plane. `rate` is in blocks a second; 0 sends all at once.

    It prints its address, sends greetings until a line comes on stdin, then the batches at their times, then an end.
    """
    payloads = _payloads(size, batches)
    loop = asyncio.get_running_loop()
    go = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), go.set)
    async with event_planes(plane, nats_url, namespace="bench") as events:
        publisher = events.open_publisher(ring_batches=1)
        print(msgspec.json.encode(publisher.source).decode(), flush=True)
        while not go.is_set():
            publisher.publish(0, b"greeting")
            await asyncio.sleep(0.01)
        loop.remove_reader(sys.stdin.fileno())
        sys.stdin.readline()
        began, began_ns = loop.time(), time.process_time_ns()
        sent, late_s = 0, 0.0
        while sent < batches:
            await asyncio.sleep(TICK_S)
            due = batches
            if rate:
                due = min(batches, int((loop.time() - began) * rate / size))
                late_s = max(late_s, loop.time() - began - (sent + 1) * size / rate)
            for number in range(sent, due):
                publisher.publish(number + 1, payloads[number])
            sent = due
        spent_s = (time.process_time_ns() - began_ns) / 1e9
        print(json.dumps({"took_s": loop.time() - began, "late_s": late_s, "spent_s": spent_s}), flush=True)
        go.clear()
        loop.add_reader(sys.stdin.fileno(), go.set)
        while not go.is_set():  # an end may be lost too
            publisher.publish(batches + 1, b"")
            await asyncio.sleep(0.02)


def _payloads(size: int, batches: int) -> list[bytes]:
    """Make batches, one after another, that form chains of CHAIN_BLOCKS new blocks."""
    draw = Random(4)
    made: list[bytes] = []
    parent: int | None = None
    for number in range(batches):
        names = array("Q", draw.randbytes(8 * size)).tolist()
        if number * size % CHAIN_BLOCKS == 0:
            parent = None
        tokens = [token & 0x1FFFF for token in array("I", draw.randbytes(4 * size * BLOCK_SIZE))]
        event = BlockStored([*names], parent, tokens, BLOCK_SIZE, medium="GPU")
        made.append(EVENT_BATCH.encode(EventBatch(0.0, [event], 0)))
        parent = names[-1]
    return made


def _report(rows: list[Row]) -> Row:
    goals: list[Goal] = []
    for row in rows:
        name = f"{row['plane']}: batches of {row['blocks a batch']}, {row['sent']}"
        ratio, lost = row["ratio"], row["batches lost"]
        over = f"{name}: received over decoded and applied alone"
        goals.append(Goal(over, ratio, "x", RATIO_GOAL, met=ratio <= RATIO_GOAL))
        goals.append(Goal(f"{name}: lost", lost, "batches", 0, met=lost == 0))
    return report("events", sys.argv[1:], goals, rows)


if __name__ == "__main__":
    raise SystemExit(main())
