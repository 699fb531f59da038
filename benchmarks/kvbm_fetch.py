"""How long does an engine wait for kvbm's answer: which of 256 blocks are in memory, and where?

A kvbm in a process of its own. Blocks are stored and committed once. Then they are fetched and released, one request
after another, through the pool's socket and an engine's own client: the time from the request to the last reply,
decoding included. `in kvbm` is the part that passes there between request and answer, in the mean, and `round trip`
what a release takes, which costs kvbm next to nothing. `cpu` is the CPU time of this process and kvbm for one request,
including kvbm's work after the answer.

What could mislead: two processes take turns, so on a busy machine the wall time depends on other programs. The blocks
are tiny, because their bytes are not sent.

    python -m benchmarks.kvbm_fetch [--blocks 256] [--rounds 300] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import select
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.report import Goal, report
from services.worker.contracts.messages import KvbmOperation
from services.worker.kv_connector.contract import KvbmAsk, KvbmReply
from services.worker.kv_connector.socket_client import SocketClient
from shared.blocks import Content
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.hashing import ContentKey, content_key, pack_tokens, root_key
from shared.messages.cards import KvLayout
from shared.messages.kvbm import (
    ATTACH,
    ATTACH_REPLY,
    FETCH,
    FETCH_REPLY,
    RELEASE,
    SETTLED,
    Attach,
    Attached,
    Fetch,
    Fetched,
    Release,
    Settled,
    StoreLayout,
)
from tests.integration.fleet import Service, fleet
from tests.integration.machine import Machine
from tests.kvbm.store_rig import Engine
from tests.servers import NatsServer

BLOCK_TOKENS = 16
LAYOUT = StoreLayout(
    "model", "weights", KvLayout("float32", layers=1, kv_heads=1, head_dim=16, block_size=BLOCK_TOKENS)
)
SLOT_BYTES = 4096
GOAL_MS = 1.0
LIMIT_S = 30.0


class FetchRow(msgspec.Struct, frozen=True):
    """The times of one kind of request, in milliseconds."""

    what: str
    median_ms: float
    least_ms: float
    p99_ms: float
    cpu_ms: float
    in_kvbm_ms: float


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="a hundred rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = measure(flags.blocks, 100 if flags.quick else flags.rounds)
    if flags.json:
        print(msgspec.json.encode(report("kvbm_fetch", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(
            f"{row.what:<20} {row.median_ms:6.2f} ms  (least {row.least_ms:.2f}, 99 % {row.p99_ms:.2f})"
            f"   in kvbm {row.in_kvbm_ms:.2f} ms   cpu {row.cpu_ms:.2f} ms"
        )
    return 0


def goals(rows: Sequence[FetchRow]) -> list[Goal]:
    """Compare the rows with the goals."""
    fetch = rows[0]
    return [Goal(f"{fetch.what}, median", fetch.median_ms, "ms", GOAL_MS, met=fetch.median_ms <= GOAL_MS)]


def measure(blocks: int, rounds: int) -> list[FetchRow]:
    """Measure fetches and releases; return the fetch's row first."""
    with tempfile.TemporaryDirectory(prefix="kvbm-fetch-", dir="/dev/shm") as name:
        nats = NatsServer(Path(name))
        nats.start()
        try:
            return uvloop.run(_measure(Path(name), nats, blocks, rounds))
        finally:
            nats.stop()


async def _measure(directory: Path, nats: NatsServer, blocks: int, rounds: int) -> list[FetchRow]:
    bus = await connect(NatsConfig(url=nats.url), "benchmark")
    engine = Engine(bus, directory / "pool", "owner", "worker", LAYOUT)
    with fleet(directory, nats.url, *Machine.where(directory)) as processes:
        pool = ("--pool-directory", str(directory / "pool"), "--pool-size-bytes", str(8 * blocks * SLOT_BYTES))
        kvbm = processes.start("kvbm", "kvbm", *pool)
        await asyncio.to_thread(processes.wait_ready)
        await engine.attach()
        contents = _chain(blocks)
        assert await engine.store(contents) == blocks
        client = SocketClient(directory / "pool")
        while not client.poll(time.monotonic()):
            select.select([client], [], [], LIMIT_S)
        asks = Asks(client, engine.owner, [content.key for content in contents])
        asks.attach(Attach(engine.worker, engine.owner, LAYOUT))
        _timed(kvbm, asks.fetch, 20)
        release = _timed(kvbm, asks.release, rounds)
        both = _timed(kvbm, asks.fetch, rounds)
        client.close()
        engine.die()
    await bus.drain()
    return [
        _row(f"fetch of {blocks} blocks", both.seconds, both.cpu_s - release.cpu_s, both.in_kvbm_s["fetch"]),
        _row("round trip", release.seconds, release.cpu_s, release.in_kvbm_s["release"]),
    ]


class Asks:
    """The requests that are timed."""

    def __init__(self, client: SocketClient, owner: str, keys: Sequence[ContentKey]) -> None:
        self._client = client
        self._fetch = FETCH.encode(Fetch(owner, b"".join(keys)))
        self._blocks = len(keys)
        self._owner = owner
        self._numbers = count(1)

    def attach(self, attach: Attach) -> None:
        """Attach through this connection."""
        assert isinstance(ATTACH_REPLY.decode(self._answer("attach", ATTACH.encode(attach))), Attached)

    def fetch(self) -> float:
        """Fetch and return the seconds; the release is not timed."""
        began_s = time.perf_counter()
        reply = FETCH_REPLY.decode(self._answer("fetch", self._fetch))
        took_s = time.perf_counter() - began_s
        assert isinstance(reply, Fetched)
        assert reply.found == self._blocks
        self._let_go(reply.ticket)
        return took_s

    def release(self) -> float:
        """Return the seconds of a release."""
        began_s = time.perf_counter()
        self._let_go(1)
        return time.perf_counter() - began_s

    def _let_go(self, ticket: int) -> None:
        answer = self._answer("release", RELEASE.encode(Release(self._owner, ticket)))
        assert SETTLED.decode(answer) == Settled()

    def _answer(self, operation: KvbmOperation, payload: bytes) -> bytes:
        """Ask, and return the one answer."""
        number = next(self._numbers)
        assert not self._client.send(KvbmAsk(number, operation, payload, LIMIT_S), time.monotonic())
        while True:
            select.select([self._client], [], [], LIMIT_S)
            for news in self._client.poll(time.monotonic()):
                assert isinstance(news, KvbmReply), news
                assert not news.failed, news.failed
                if news.number == number and news.last:
                    return news.payload


class Timed(NamedTuple):
    """The measurements of one kind of request."""

    seconds: list[float]
    """The seconds of each request."""
    cpu_s: float
    """CPU seconds of one request, in this process and kvbm."""
    in_kvbm_s: dict[str, float]
    """Seconds of one request within kvbm, by operation."""


def _timed(kvbm: Service, ask: Callable[[], float], rounds: int) -> Timed:
    before = _in_kvbm(kvbm)
    cpu_s = time.process_time() + _cpu_s(kvbm.process.pid)
    seconds = [ask() for _ in range(rounds)]
    cpu_s = time.process_time() + _cpu_s(kvbm.process.pid) - cpu_s
    after = _in_kvbm(kvbm)
    in_kvbm_s = {operation: (after[operation] - before.get(operation, 0.0)) / rounds for operation in after}
    return Timed(seconds, cpu_s / rounds, in_kvbm_s)


def _in_kvbm(kvbm: Service) -> dict[str, float]:
    """Return kvbm's seconds so far, by operation."""
    with urllib.request.urlopen(f"{kvbm.url}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["headrace_kvbm_request_seconds"].samples
    return {sample.labels["operation"]: sample.value for sample in samples if sample.name.endswith("_sum")}


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _row(what: str, seconds: Sequence[float], cpu_s: float, in_kvbm_s: float) -> FetchRow:
    p99_s = statistics.quantiles(seconds, n=100)[-1]
    return FetchRow(
        what, 1e3 * statistics.median(seconds), 1e3 * min(seconds), 1e3 * p99_s, 1e3 * cpu_s, 1e3 * in_kvbm_s
    )


def _chain(blocks: int) -> list[Content]:
    """Make a chain of blocks."""
    contents: list[Content] = []
    key = None
    for number in range(blocks):
        parent, tokens = key, pack_tokens(range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
        key = content_key(parent or root_key(LAYOUT.model), tokens)
        contents.append(Content(key=key, parent=parent, tokens=tokens))
    return contents


if __name__ == "__main__":
    sys.exit(main())
