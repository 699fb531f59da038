"""How long does an engine's worker wait for kvbm's answer: which of 256 blocks are in memory, and where?

A kvbm in a process of its own and a real nats-server. Blocks are stored and committed once; then they are fetched and
released, one request after another, as a worker's shell asks: the time from the request to the last reply, decoding
included. `round trip` is a release, which costs kvbm next to nothing. `cpu` is what this process and kvbm take for one.

What could mislead: three processes take turns, so where other programs have the cores, the wall time is theirs. The
blocks are tiny, because their bytes do not travel.

    python -m benchmarks.kvbm_fetch [--blocks 256] [--rounds 300] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.report import Goal, report
from shared.blocks import Content
from shared.config import NatsConfig, environment
from shared.errors import NoResponders
from shared.hashing import content_key, pack_tokens, root_key
from shared.kvbm_messages import Fetched, StoreLayout
from shared.messages import KvLayout
from shared.nats_bus import connect
from shared.pool_lock import kvbm_of
from tests.kvbm.store_rig import NAMESPACE, Engine
from tests.servers import NatsServer

BLOCK_TOKENS = 16
LAYOUT = StoreLayout(
    "model", "weights", KvLayout("float32", layers=1, kv_heads=1, head_dim=16, block_size=BLOCK_TOKENS)
)
SLOT_BYTES = 4096
GOAL_MS = 1.0
START_LIMIT_S = 30.0


class Row(msgspec.Struct, frozen=True):
    """One kind of request, milliseconds."""

    what: str
    median_ms: float
    least_ms: float
    p90_ms: float
    cpu_ms: float


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser()
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
            f"{row.what:<20} {row.median_ms:6.2f} ms  (least {row.least_ms:.2f}, 90 % {row.p90_ms:.2f})"
            f"   cpu {row.cpu_ms:.2f} ms"
        )
    return 0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What was promised."""
    fetch = rows[0]
    return [Goal(f"{fetch.what}, median", fetch.median_ms, "ms", GOAL_MS, met=fetch.median_ms <= GOAL_MS)]


def measure(blocks: int, rounds: int) -> list[Row]:
    """The fetch's row first."""
    with tempfile.TemporaryDirectory(prefix="kvbm-fetch-", dir="/dev/shm") as name:
        nats = NatsServer(Path(name))
        nats.start()
        try:
            return uvloop.run(_measure(Path(name), nats, blocks, rounds))
        finally:
            nats.stop()


async def _measure(directory: Path, nats: NatsServer, blocks: int, rounds: int) -> list[Row]:
    contents = _chain(blocks)
    keys = [content.key for content in contents]
    bus = await connect(NatsConfig(url=nats.url), "benchmark")
    engine = Engine(bus, directory / "pool", "owner", "worker", LAYOUT)

    async def fetch() -> float:
        """Seconds; released again, untimed."""
        began_s = time.perf_counter()
        replies = await engine.fetch(keys)
        took_s = time.perf_counter() - began_s
        last = replies[-1]
        assert isinstance(last, Fetched)
        assert last.found == blocks
        await engine.release(last.ticket)
        return took_s

    async def release() -> float:
        began_s = time.perf_counter()
        await engine.release(1)
        return time.perf_counter() - began_s

    async with _kvbm(directory, nats.url, 8 * blocks * SLOT_BYTES) as pid:
        await _attached(engine, directory / "pool")
        assert await engine.store(contents) == blocks
        await _timed(pid, fetch, 20)
        releases_s, release_s = await _timed(pid, release, rounds)
        fetches_s, both_s = await _timed(pid, fetch, rounds)
        engine.die()
    await bus.drain()
    return [
        _row(f"fetch of {blocks} blocks", fetches_s, both_s - release_s),
        _row("round trip", releases_s, release_s),
    ]


async def _timed(pid: int, ask: Callable[[], Awaitable[float]], rounds: int) -> tuple[list[float], float]:
    """Each one's seconds; and the CPU time of one, ours and that of process `pid`."""
    cpu_s = time.process_time() + _cpu_s(pid)
    seconds = [await ask() for _ in range(rounds)]
    return seconds, (time.process_time() + _cpu_s(pid) - cpu_s) / rounds


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _row(what: str, seconds: Sequence[float], cpu_s: float) -> Row:
    deciles = statistics.quantiles(seconds, n=10)
    return Row(what, 1e3 * statistics.median(seconds), 1e3 * min(seconds), 1e3 * deciles[-1], 1e3 * cpu_s)


def _chain(blocks: int) -> list[Content]:
    """Blocks that follow one another."""
    contents: list[Content] = []
    key = None
    for number in range(blocks):
        parent, tokens = key, pack_tokens(range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))
        key = content_key(parent or root_key(LAYOUT.model), tokens)
        contents.append(Content(key=key, parent=parent, tokens=tokens))
    return contents


@asynccontextmanager
async def _kvbm(directory: Path, nats_url: str, size_bytes: int) -> AsyncIterator[int]:
    """The process's id."""
    flags = [
        *("--namespace", NAMESPACE, "--nats-url", nats_url),
        *("--discovery-backend", "file", "--discovery-path", str(directory / "discovery")),
        *("--pool-directory", str(directory / "pool"), "--pool-size-bytes", str(size_bytes)),
        *("--observe-log-level", "warning"),
    ]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.kvbm", *flags, env=environment())
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def _attached(engine: Engine, pool: Path) -> None:
    """Once the kvbm is there."""
    async with asyncio.timeout(START_LIMIT_S):
        while not kvbm_of(pool):  # noqa: ASYNC110 - it is a file that another process writes
            await asyncio.sleep(0.05)
        engine.hold()
        while True:
            try:
                await engine.attach()
                return
            except NoResponders:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
