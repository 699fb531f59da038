"""What would an engine's request to kvbm gain by a Unix socket in place of the worker's shell and NATS?

    relays   engine ── socket pair ── shell ── NATS server ── kvbm     and back: as it is today
    socket   engine ── Unix socket ────────────────────────── kvbm     and back

An engine, a shell and a kvbm, each a process of its own, and a real nats-server. The engine's end, the shell's end and
the bus are the product's; this program's shell relays as `KvbmClient` does, and its kvbm answers at once with as many
bytes as a kvbm does. So what kvbm itself takes (0.1 to 0.5 ms) is in neither figure. The engine asks over both paths in
turn, thousands of times, one request after another; the same kvbm process answers both in one event loop.

A `fetch` has a content key for each block and 12 bytes for each in its reply, which the bus streams; a `release` and
its reply are a few bytes. `saved` is the difference of the medians, and `share` is `saved` as a share of a first token
of `--first-ms`: by default the 25.4 ms of a prompt of 8,192 tokens (512 blocks) whose blocks are in kvbm's memory, on
an H200 (benchmarks/README.md). A first token waits for one fetch; the release comes after it.

What could mislead: four processes take turns in one case and two in the other, so where other programs have the cores
the gain is larger than it would be alone. The bare socket has no framework around it, no limits and no reconnecting.

    python -m benchmarks.kvbm_path [--rounds 2000] [--first-ms 25.4] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import uvloop

from benchmarks.report import report
from services.worker.contracts.messages import KvbmAsk, KvbmReply
from services.worker.engine.channel import ChannelClosed, EngineEnd, ShellEnd
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig
from tests.servers import NatsServer

PREFIX = "headrace.benchmark.kvbm.path"
LIMIT_S = 30.0
WARM_UP = 50
FIRST_MS = 25.4
PREFIX_BYTES = 4
READY = b"ready"

Way = Literal["relays", "socket"]


class Exchange(NamedTuple):
    """A request and its reply, by their sizes."""

    what: str
    operation: Literal["fetch", "release"]
    asked_bytes: int
    reply_bytes: int


EXCHANGES = (
    Exchange("fetch of 512 blocks", "fetch", 512 * 16 + 100, 512 * 12 + 100),
    Exchange("fetch of 256 blocks", "fetch", 256 * 16 + 100, 256 * 12 + 100),
    Exchange("release", "release", 80, 20),
)


class Row(msgspec.Struct, frozen=True):
    """One kind of exchange, milliseconds by path."""

    what: str
    relays_ms: float
    relays_p99_ms: float
    socket_ms: float
    socket_p99_ms: float
    saved_ms: float
    share: float
    """`saved_ms` as a share of a first token."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=2000, help="of each kind, over each path")
    parser.add_argument("--first-ms", type=float, default=FIRST_MS, help="a first token, which `share` is of")
    parser.add_argument("--quick", action="store_true", help="300 rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = measure(300 if flags.quick else flags.rounds, flags.first_ms)
    if flags.json:
        print(msgspec.json.encode(report("kvbm_path", sys.argv[1:], [], rows)).decode())
        return 0
    for row in rows:
        print(
            f"{row.what:<20} relays {row.relays_ms:.3f} ms (99 % {row.relays_p99_ms:.2f})"
            f"   socket {row.socket_ms:.3f} ms (99 % {row.socket_p99_ms:.2f})"
            f"   saved {row.saved_ms:.3f} ms, {100 * row.share:.1f} % of a first token"
        )
    return 0


def measure(rounds: int, first_ms: float = FIRST_MS) -> list[Row]:
    """Return a row for each kind of exchange."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvbm-path-") as name:
        nats = NatsServer(Path(name))
        nats.start()
        started, ready = processes.Pipe(duplex=False)
        unix = Path(name) / "kvbm"
        kvbm = processes.Process(target=_kvbm, args=(nats.url, unix, ready))
        try:
            kvbm.start()
            assert started.recv_bytes() == READY
            shell, engine = socket.socketpair()
            results, told = processes.Pipe(duplex=False)
            asker = processes.Process(target=_engine, args=(engine, unix, rounds, told))
            asker.start()
            engine.close()
            uvloop.run(_shell(nats.url, shell))
            seconds: dict[tuple[str, Way], list[float]] = results.recv()
            asker.join()
        finally:
            kvbm.terminate()
            kvbm.join()
            nats.stop()
    return [_row(what, seconds[what, "relays"], seconds[what, "socket"], first_ms) for what, *_ in EXCHANGES]


def _row(what: str, relays_s: Sequence[float], socket_s: Sequence[float], first_ms: float) -> Row:
    relays_ms, socket_ms = (1e3 * statistics.median(each) for each in (relays_s, socket_s))
    relays_p99_ms, socket_p99_ms = (1e3 * statistics.quantiles(each, n=100)[-1] for each in (relays_s, socket_s))
    saved_ms = relays_ms - socket_ms
    return Row(what, relays_ms, relays_p99_ms, socket_ms, socket_p99_ms, saved_ms, saved_ms / first_ms)


# --- the engine


def _engine(connection: socket.socket, unix: Path, rounds: int, told: Connection) -> None:
    """Ask over both paths in turn, and send the seconds of each exchange."""
    end = EngineEnd(connection)
    direct = socket.socket(socket.AF_UNIX)
    direct.connect(str(unix))
    seconds: dict[tuple[str, Way], list[float]] = {}
    number = 0
    for turn in range(-WARM_UP, rounds):
        for exchange in EXCHANGES:
            asked = bytes(PREFIX_BYTES) + os.urandom(exchange.asked_bytes - PREFIX_BYTES)
            asked = exchange.reply_bytes.to_bytes(PREFIX_BYTES, "little") + asked[PREFIX_BYTES:]
            number += 1
            ways: dict[Way, Callable[[], int]] = {
                "relays": partial(_over_relays, end, number, exchange, asked),
                "socket": partial(_over_socket, direct, asked),
            }
            for way in sorted(ways, reverse=bool(turn % 2)):
                began_s = time.perf_counter()
                answered = ways[way]()
                took_s = time.perf_counter() - began_s
                assert answered == exchange.reply_bytes, f"{answered} bytes over {way}"
                if turn >= 0:
                    seconds.setdefault((exchange.what, way), []).append(took_s)
    end.close()
    told.send(seconds)


def _over_relays(end: EngineEnd, number: int, exchange: Exchange, asked: bytes) -> int:
    end.send(KvbmAsk(number, exchange.operation, asked, LIMIT_S))
    while True:
        for command in end.receive(None):
            if isinstance(command, KvbmReply) and command.last:
                assert command.number == number
                return len(command.payload)


def _over_socket(direct: socket.socket, asked: bytes) -> int:
    direct.sendall(len(asked).to_bytes(PREFIX_BYTES, "little") + asked)
    buffer = bytearray()
    while len(buffer) < PREFIX_BYTES or len(buffer) < PREFIX_BYTES + int.from_bytes(buffer[:PREFIX_BYTES], "little"):
        buffer += direct.recv(1 << 18)
    return len(bytes(buffer[PREFIX_BYTES:]))


# --- the shell


async def _shell(url: str, connection: socket.socket) -> None:
    """Relay until the engine ends."""
    bus = await connect(NatsConfig(url=url), "shell")
    end = await ShellEnd.open(connection)
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                ask = await end.receive()
                assert isinstance(ask, KvbmAsk)
                tasks.create_task(_relay(bus, end, ask))
    except* ChannelClosed:
        pass
    await bus.drain()


async def _relay(bus: NatsBus, end: ShellEnd, ask: KvbmAsk) -> None:
    subject = f"{PREFIX}.{ask.operation}"
    if ask.operation == "fetch":
        async with bus.stream(subject, ask.payload, idle_timeout_s=ask.timeout_s) as answers:
            async for answer in answers:
                last = answer.headers.get(LAST_HEADER) == "true"
                end.send(KvbmReply(ask.number, answer.payload, last=last))
    else:
        answer = await bus.request(subject, ask.payload, timeout_s=ask.timeout_s)
        end.send(KvbmReply(ask.number, answer.payload))


# --- kvbm


def _kvbm(url: str, unix: Path, ready: Connection) -> None:
    uvloop.run(_answering(url, unix, ready))


async def _answering(url: str, unix: Path, ready: Connection) -> None:
    bus = await connect(NatsConfig(url=url), "kvbm")

    async def answer(message: Message) -> None:
        headers = {LAST_HEADER: "true"} if message.subject.endswith(".fetch") else None
        await bus.publish(message.reply, _reply(message.payload), headers=headers)

    await bus.subscribe(f"{PREFIX}.*", answer)
    await asyncio.get_running_loop().create_unix_server(_Direct, str(unix))
    ready.send_bytes(READY)
    await asyncio.Event().wait()


def _reply(asked: bytes) -> bytes:
    return bytes(int.from_bytes(asked[:PREFIX_BYTES], "little"))


class _Direct(asyncio.Protocol):
    """One engine's connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        size = int.from_bytes(self._buffer[:PREFIX_BYTES], "little")
        if len(self._buffer) >= PREFIX_BYTES + size:
            reply = _reply(bytes(self._buffer[PREFIX_BYTES:]))
            self._buffer.clear()
            self._transport.write(len(reply).to_bytes(PREFIX_BYTES, "little") + reply)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
