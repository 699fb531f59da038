"""Does anything leak when clients leave? Streams through `headrace route`, each cut by its client.

    client ── HTTP, SSE ──✂──▶ `headrace route` ──▶ two servers with an engine's steps (`gateways_server.py`)

Clients leave in four ways, in turn: in the middle of their body, after it, and after some tokens, by closing (FIN) or
by resetting (RST) the connection. A sample is taken before, after a warm-up of --cuts / 8 streams, and after each
quarter: 20 s after the last stream, by when idle connections to the servers are closed.

rss       of each program with its children. Goal: flat in 5 % over the second half
files     open descriptors of the same. Goal: as many at the end as before
running   requests that the frontend or a worker still counts. Goal: none

What could mislead: an allocator keeps what the largest load took, so memory of the first half is no leak. Routers
remember the last 16,384 attempts that ended, and for two minutes which blocks were sent where, so the router grows
until then; with --words 1 prompts have no whole block. A leak of less than a few hundred bytes a stream is below 5 % of
a program.

    python -m benchmarks.cut_streams [--cuts 10000] [--words 200] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from benchmarks.gateways import OURS, Servers, gateways, running
from benchmarks.process_costs import rss_bytes
from benchmarks.report import Goal, report
from benchmarks.serving_stacks import NAME
from deploy.local.state import StateDirectory
from tests.process_tree import below
from tests.tiny_model import write_tiny_model

Way = Literal["body", "unanswered", "close", "reset"]
WAYS: tuple[Way, ...] = get_args(Way)
CUTS, QUICK_CUTS = 10_000, 800
AT_ONCE = 64
OUTPUT_TOKENS, READ_EVENTS = 256, 5
SETTLE_S = 20.0
"""Seconds from the last stream to a sample. aiohttp closes idle connections after 15."""
READ_LIMIT_S = 120.0
FLAT_GOAL = 0.05
_INFLIGHT = re.compile(r"^headrace_inflight_requests(?:\{[^}]*\})? (\S+)$", re.M)
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""


class CutRow(Struct, frozen=True):
    """The state after some streams were cut."""

    cut: int
    refused: int
    """Streams that got no 200, where the client waited for tokens."""
    running: int
    rss_mb: dict[str, float]
    files: dict[str, int]


def request_of(number: int, words: int) -> bytes:
    """Return a request with a prompt of its own."""
    text = " ".join([f"request {number}:", *(f"word{(number + each) % 1000}" for each in range(words))])
    message = {"role": "user", "content": text}
    fields: dict[str, Any] = {"model": NAME, "messages": [message], "max_tokens": OUTPUT_TOKENS, "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def cut(port: int, way: Way, request: bytes) -> bool:
    """Send a request and leave in this way. Return whether it was answered with 200, if the way waits for that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        good = True
        writer.write(request[: len(request) // 2] if way == "body" else request)
        await writer.drain()
        if way in ("close", "reset"):
            async with asyncio.timeout(READ_LIMIT_S):
                good = b" 200 " in await reader.readline()
                for _ in range(READ_EVENTS if good else 0):
                    await reader.readuntil(b"data: ")
        if way == "reset":
            opened: socket.socket = writer.get_extra_info("socket")
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return good
    finally:
        writer.close()


async def cut_many(port: int, numbers: Sequence[int], words: int) -> int:
    """Cut a stream for each number, AT_ONCE at a time. Return how many were refused."""
    waiting, refused = iter(numbers), 0

    async def client() -> None:
        nonlocal refused
        for number in waiting:
            refused += not await cut(port, WAYS[number % len(WAYS)], request_of(number, words))

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
    return refused


class Programs:
    """The programs of one `headrace route`, as its record names them."""

    def __init__(self, record: Path, pid: int) -> None:
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["programs"]
        numbers = itertools.count()
        names = {name: f"worker-{next(numbers)}" if name.startswith("worker") else name for name in sorted(found)}
        self.pids = {"route": pid} | {names[name]: int(each["pid"]) for name, each in found.items()}
        self._observed = [each["observe"] for name, each in found.items() if name.startswith(("frontend", "worker"))]

    def sample(self, cut_so_far: int, refused: int) -> CutRow:
        """Look at all programs."""
        trees = {name: [pid] if name == "route" else [pid, *below(pid)] for name, pid in self.pids.items()}
        return CutRow(
            cut=cut_so_far,
            refused=refused,
            running=sum(_running(url) for url in self._observed),
            rss_mb={name: sum(map(rss_bytes, pids)) / 1e6 for name, pids in trees.items()},
            files={
                name: sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids) for name, pids in trees.items()
            },
        )


def _running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60.0) as answer:
        return int(sum(map(float, _INFLIGHT.findall(answer.read().decode()))))


def measure(cuts: int, words: int, *, shown: bool = True) -> list[CutRow]:
    """Start everything, and cut streams; return a row before, after the warm-up, and after each quarter."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        state = StateDirectory(directory / "state")
        for part in (state.run, state.logs):
            part.mkdir(parents=True, exist_ok=True)
        model = write_tiny_model(directory / "model", vocab=16_000, context_length=131_072)
        rows: list[CutRow] = []
        with Servers(model, state) as servers:
            ours = next(each for each in gateways(None, servers.ports, directory) if each.name == OURS)
            with running(ours, state) as stack:
                programs = Programs(StateDirectory(directory / "route").record, stack.pids(OURS)[0])
                done = refused = 0
                warm_up = cuts // 8
                for size in (0, warm_up, *[cuts // 4] * 4):
                    refused += asyncio.run(cut_many(stack.port, range(done, done + size), words))
                    done += size
                    time.sleep(SETTLE_S)
                    rows.append(programs.sample(done, refused))
                    if shown:
                        print(line(rows[-1]), flush=True)
        return rows


def line(row: CutRow) -> str:
    """Return a row as text."""
    sizes = "  ".join(f"{name} {size:.1f}" for name, size in row.rss_mb.items())
    files = "  ".join(f"{name} {count}" for name, count in row.files.items())
    return f"{row.cut:6} cut, {row.refused} refused, {row.running} running\n    MB     {sizes}\n    files  {files}"


def goals(rows: Sequence[CutRow]) -> list[Goal]:
    """Compare the end with the warmed-up state, and with the half."""
    _, warm, *_, half, _, last = rows
    grown = max(last.rss_mb[name] / half.rss_mb[name] - 1 for name in last.rss_mb)
    more = max(last.files[name] - warm.files[name] for name in last.files)
    still = max(row.running for row in rows)
    return [
        Goal("growth of a program's rss over the second half", round(grown, 4), "share", FLAT_GOAL, grown <= FLAT_GOAL),
        Goal("files of a program more at the end than before", more, "files", 0, more <= 0),
        Goal("requests that still run", still, "requests", 0, still == 0),
        Goal("streams that were refused", last.refused, "requests", 0, last.refused == 0),
    ]


def main() -> int:
    """Print rows and goals, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cuts", type=int, default=CUTS, help="streams that are cut after the warm-up")
    parser.add_argument("--words", type=int, default=200, help="words of a prompt; 1 is less than a block")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CUTS} cuts")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows = measure(QUICK_CUTS if flags.quick else flags.cuts, flags.words, shown=not flags.json)
    found = goals(rows)
    if flags.json:
        print(msgspec.json.encode(report("cut_streams", sys.argv[1:], found, rows)).decode())
        return 0
    for goal in found:
        print(f"{goal.name}: {goal.value:g} {goal.unit} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
