"""What does the endpoint picker cost, and how long does a gateway wait for its choice?

    this process, as gateways are ── ext_proc over grpc.aio ──▶ frontend of `headrace picker` ─▶ router
                                                                10 simulated servers, each with an attached worker

text        chats of 100,000 tokens, 10 a second at random times; prompts of each of ten groups share 90,000 of them
ids         the same prompts as token ids, which need no tokenizing
4 kB        completions of 4 kB of token ids, 8 at once
unread      bodies of 4 kB that have no prompt which is read (`/v1/embeddings`), 8 at once: by load alone
chunks      answers of 1, 101 and 401 chunks through a real Envoy in body mode NONE, 8 at once

A choice's time is from the first message of a request to the answer with its endpoint. Bodies go in pieces of 62 kB
and come back, as in FULL_DUPLEX_STREAMED; a request of the first two loads is held for a second after its choice. CPU
and memory of all processes of `headrace picker` count: with the attached workers, which read the servers' metrics.

What could mislead: the gateway's side is Python too and takes about as much CPU as the picker, on the same cores; so
with two cores the times are longer than a gateway in C++ sees. The small model's tokenizer has 2 bytes a token, a real
one 4 to 5. Most of the memory is that of the workers, one for each server.

    python -m benchmarks.picker [--only text,ids,...] [--seconds 20] [--repeats 3] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from benchmarks.process_costs import cpu_of, rss_bytes
from benchmarks.report import Goal, report
from benchmarks.serving_stacks import child_process
from benchmarks.sse_load import percentile_ms, words_of
from deploy.local.state import StateDirectory
from services.frontend.picker.wire import MESSAGES
from tests.integration.stack import START_LIMIT_S, Up, started
from tests.picker import envoy
from tests.picker.environment import RUNS_HERE
from tests.picker.environment import envoy as envoy_program
from tests.picker.gateway import Gateway, add_headers, connected, destination
from tests.picker.servers import PIECES, serving
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

SERVERS = 10
TOKENS = 100_000
GROUPS = 10
SHARED = 0.9
RATE = 10.0
HOLD_S = 1.0
PIECE_BYTES = 62_000
SMALL_BYTES = 4096
AT_ONCE = 8
SMALL_REQUESTS = 2000
CHUNKS = (1, 101, 401)
CHUNKED_REQUESTS = 240
MODEL = "model"
PATHS = {
    "text": "/v1/chat/completions",
    "ids": "/v1/completions",
    "4 kB": "/v1/completions",
    "unread": "/v1/embeddings",
}
CORES, MEMORY_MB = 2.0, 1000.0
P95_MS = {"text": 150.0, "ids": 5.0}
SMALL_MS = 1.0
IDLE_S = 5.0
QUICK_S = 5.0
CHUNK_US = 1.0
"""CPU time in µs that counts as none: the price of any message is a hundred times that."""

Request = Callable[[], Coroutine[Any, Any, float]]


class PickerRow(Struct, frozen=True):
    """One run of a load."""

    load: str
    requests: int
    seconds: float
    p50_ms: float
    p95_ms: float
    cpu_s: dict[str, float]
    """CPU time of each kind of process."""
    rss_mb: dict[str, float]
    """Memory of each kind of process, at the end."""
    chunks: int = 0
    """Chunks of each answer."""

    @property
    def cores(self) -> float:
        """The share of a core of all processes."""
        return sum(self.cpu_s.values()) / self.seconds

    @property
    def choosing_s(self) -> float:
        """CPU time of the processes that choose."""
        return self.cpu_s["frontend"] + self.cpu_s["router"]


class Costs:
    """The processes of a running `headrace picker`, by kind."""

    def __init__(self, up: Up) -> None:
        self._pids = [(name.partition("-")[0], each["pid"]) for name, each in up.record["programs"].items()]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each kind so far."""
        return self._summed(lambda pid: cpu_of(pid).sum_s)

    def rss_mb(self) -> dict[str, float]:
        """Return the memory of each kind."""
        return self._summed(lambda pid: rss_bytes(pid) / 1e6)

    def _summed(self, figure: Callable[[int], float]) -> dict[str, float]:
        kinds: dict[str, float] = {}
        for kind, pid in self._pids:
            kinds[kind] = kinds.get(kind, 0.0) + figure(pid)
        return kinds


class Prompts:
    """Bodies of requests, as the messages of a gateway."""

    def __init__(self, model: Path, draw: Random) -> None:
        vocabulary: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = words_of(model / "tokenizer.json")
        self._ids = [vocabulary[f"Ġ{word}"] for word in self._words]
        self._draw = draw
        shared = int(TOKENS * SHARED)
        self._groups = [self._drawn(shared) for _ in range(GROUPS)]

    def _drawn(self, tokens: int) -> list[int]:
        return self._draw.choices(range(len(self._words)), k=tokens)

    def messages(self, load: str) -> list[Any]:
        """Return the messages of a new request."""
        return _messages(PATHS[load], json.dumps(self._body(load)).encode())

    def _body(self, load: str) -> Mapping[str, Any]:
        if load in ("4 kB", "unread"):
            ids = [self._ids[word] for word in self._drawn(SMALL_BYTES)]
            sizes = itertools.accumulate(len(str(token)) + 2 for token in ids)
            fits = sum(size < SMALL_BYTES - 60 for size in sizes)
            return {"model": MODEL, "max_tokens": 8, "prompt" if load == "4 kB" else "input": ids[:fits]}
        words = self._draw.choice(self._groups)
        words = words + self._drawn(TOKENS - len(words))
        if load == "ids":
            return {"model": MODEL, "max_tokens": 8, "prompt": [self._ids[word] for word in words]}
        text = " ".join(self._words[word] for word in words)
        return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}]}


def _messages(path: str, body: bytes) -> list[Any]:
    first = MESSAGES["ProcessingRequest"]()
    add_headers(first.request_headers, {":method": "POST", ":path": path}, ended=False)
    first.protocol_config.request_body_mode, first.protocol_config.response_body_mode = 4, 0
    messages = [first]
    for at in range(0, len(body), PIECE_BYTES):
        piece = MESSAGES["ProcessingRequest"]()
        piece.request_body.body = body[at : at + PIECE_BYTES]
        piece.request_body.end_of_stream = at + PIECE_BYTES >= len(body)
        messages.append(piece)
    return messages


async def ask(gateway: Gateway, messages: Sequence[Any], hold_s: float) -> float:
    """Make one request as a gateway does, and return the seconds that its choice took."""
    loop = asyncio.get_running_loop()
    stream, begun_s = gateway.ask(), loop.time()
    for message in messages:
        await stream.call.write(message)
    reply = await stream.read()
    took_s = loop.time() - begun_s
    endpoint, _ = destination(reply)
    assert endpoint, f"no endpoint: {reply}"
    for _ in messages[1:]:
        await stream.read()
    await asyncio.sleep(hold_s)
    await stream.answer({":status": "200", "content-type": "text/event-stream"}, served=endpoint)
    await stream.read()
    await stream.end()
    return took_s


async def paced(requests: Sequence[Request], draw: Random) -> list[float]:
    """Begin requests at random times, RATE a second, and return what each returns."""
    async with asyncio.TaskGroup() as tasks:
        made = []
        for request in requests:
            made.append(tasks.create_task(request()))
            await asyncio.sleep(draw.expovariate(RATE))
    return [task.result() for task in made]


async def in_turn(requests: Sequence[Request]) -> list[float]:
    """Make AT_ONCE requests at a time, and return what each returns."""
    left = iter(requests)

    async def one_after_another() -> list[float]:
        return [await request() for request in left]

    return list(itertools.chain(*await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))))


class PickerBench:
    """Makes all runs, in order."""

    def __init__(self, flags: argparse.Namespace, directory: Path) -> None:
        self.rows: list[PickerRow] = []
        self._flags = flags
        self._directory = directory
        self._model = write_tiny_model(directory / MODEL, vocab=16_000, context_length=131_072)
        self._draw = Random(1)
        self._repeats = 1 if flags.quick else flags.repeats

    async def run(self) -> None:
        """Start everything, and run each load in turn."""
        wanted = self._flags.only.split(",")
        if loads := [load for load in PATHS if load in wanted]:
            await self._direct(loads)
        if "chunks" in wanted and RUNS_HERE:
            await self._chunks()

    async def _direct(self, loads: Sequence[str]) -> None:
        """Run the loads that need no answers."""
        ports = [free_port() for _ in range(SERVERS)]
        state = StateDirectory(self._directory / "servers")
        for part in (state.run, state.logs):
            part.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.gateways_server", "--port", *map(str, ports)]
        prompts = Prompts(self._model, self._draw)
        with child_process("servers", [*command, "--model", str(self._model), "--name", MODEL], state, {}):
            async with self._picker([f"127.0.0.1:{port}" for port in ports]) as (up, address):
                costs = Costs(up)
                await self._measure("idle", costs, _nothing)
                async with connected(address) as gateway:
                    for load in list(loads) * self._repeats:
                        await self._one(load, costs, gateway, prompts)

    async def _one(self, load: str, costs: Costs, gateway: Gateway, prompts: Prompts) -> None:
        large = load in ("text", "ids")
        seconds = QUICK_S if self._flags.quick else self._flags.seconds
        made = [prompts.messages(load) for _ in range(int(RATE * seconds) if large else SMALL_REQUESTS)]
        await ask(gateway, made[0], 0.0)
        asked = [partial(ask, gateway, messages, HOLD_S if large else 0.0) for messages in made]
        await self._measure(load, costs, partial(paced, asked, self._draw) if large else partial(in_turn, asked))

    async def _chunks(self) -> None:
        """Run the load whose answers have chunks."""
        servers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        body = json.dumps({"model": MODEL, "prompt": "once upon a time"}).encode()
        async with serving(servers, self._model) as simulated:
            for server in simulated:
                server.peer.models = [{"id": MODEL, "root": str(self._model)}]
            async with (
                self._picker(servers) as (up, address),
                envoy.running(envoy_program(), address, servers, self._directory) as ports,
                aiohttp.ClientSession() as http,
            ):
                costs = Costs(up)
                await self._measure("idle", costs, _nothing)
                for chunks in CHUNKS * self._repeats:
                    asked = [partial(post, http, ports["none"], body, chunks)] * CHUNKED_REQUESTS
                    await self._measure("chunks", costs, partial(in_turn, asked), chunks)

    @asynccontextmanager
    async def _picker(self, servers: Sequence[str]) -> AsyncIterator[tuple[Up, str]]:
        """Run `headrace picker` until each server serves."""
        port, urls = free_port(), [f"http://{server}" for server in servers]
        state = self._directory / f"state-{port}"
        with started(state, "picker", "--picker", str(port), "--model", str(self._model), *urls) as up:
            async with asyncio.timeout(START_LIMIT_S):
                while not up.ready.is_set() or sum(": serves\n" in line for line in up.output) < len(servers):
                    if up.process.poll() is not None:
                        raise SystemExit("".join(up.output) + up.logs())
                    await asyncio.sleep(0.1)
            yield up, f"127.0.0.1:{port}"

    async def _measure(
        self, load: str, costs: Costs, run: Callable[[], Awaitable[list[float]]], chunks: int = 0
    ) -> None:
        loop = asyncio.get_running_loop()
        before, begun_s = costs.cpu_s(), loop.time()
        took_s = sorted(await run())
        seconds, after = loop.time() - begun_s, costs.cpu_s()
        cpu_s = {kind: spent - before[kind] for kind, spent in after.items()}
        p50_ms, p95_ms = (percentile_ms(took_s, percent) or 0.0 for percent in (50, 95))
        row = PickerRow(load, len(took_s), seconds, p50_ms, p95_ms, cpu_s, costs.rss_mb(), chunks)
        self.rows.append(row)
        if not self._flags.json:
            print(line(row), flush=True)


async def _nothing() -> list[float]:
    await asyncio.sleep(IDLE_S)
    return [IDLE_S]


async def post(http: aiohttp.ClientSession, url: str, body: bytes, chunks: int) -> float:
    """Make one request through Envoy, and return the seconds until the answer is there."""
    loop = asyncio.get_running_loop()
    headers = {"Content-Type": "application/json", PIECES: str(chunks)}
    begun_s = loop.time()
    async with http.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
        assert (await answer.read()).count(b"data: ") == chunks + 1, answer.status
    return loop.time() - begun_s


def line(row: PickerRow) -> str:
    """Return a row as text."""
    each = "  ".join(
        f"{kind} {1000 * cpu_s / row.requests:.2f} ms {row.rss_mb[kind]:.0f} MB" for kind, cpu_s in row.cpu_s.items()
    )
    return (
        f"{row.load:7}{f' {row.chunks} chunks' if row.chunks else ''} {row.requests} requests in {row.seconds:.1f} s: "
        f"{row.p50_ms:.1f} / {row.p95_ms:.1f} ms, {row.cores:.2f} cores, {sum(row.rss_mb.values()):.0f} MB; "
        f"a request and memory: {each}"
    )


def goals(rows: Sequence[PickerRow]) -> list[Goal]:
    """Compare the medians over all runs of each load."""
    found: list[Goal] = []

    def add(load: str, what: str, unit: str, goal: float, figure: Callable[[PickerRow], float]) -> None:
        values = [figure(row) for row in rows if row.load == load]
        if values:
            value = statistics.median(values)
            found.append(Goal(f"{load}: {what}", value, unit, goal, value <= goal))

    for load, goal in P95_MS.items():
        add(load, "choice, p95", "ms", goal, lambda row: row.p95_ms)
        add(load, "CPU of all processes", "cores", CORES, lambda row: row.cores)
        add(load, "memory of all processes", "MB", MEMORY_MB, lambda row: sum(row.rss_mb.values()))
    for load in ("4 kB", "unread"):
        add(
            load, "CPU a request, frontend and router", "ms", SMALL_MS, lambda row: 1000 * row.choosing_s / row.requests
        )
    if (slope := us_a_chunk(rows)) is not None:
        found.append(Goal("CPU a chunk, frontend and router", slope, "µs", CHUNK_US, slope <= CHUNK_US))
    return found


def us_a_chunk(rows: Sequence[PickerRow]) -> float | None:
    """Return the slope of the CPU time over the chunks of answers, without what the processes take when they are idle.
    None if it was not measured."""
    idle = next((row.choosing_s / row.seconds for row in reversed(rows) if row.load == "idle"), 0.0)
    points = [
        (row.chunks, 1e6 * (row.choosing_s - idle * row.seconds) / row.requests) for row in rows if row.load == "chunks"
    ]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if points else None


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--only", default=",".join([*PATHS, "chunks"]), help="the loads")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load of large prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short run of each load")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = PickerBench(flags, Path(name))
        asyncio.run(bench.run())
    found = goals(bench.rows)
    if flags.json:
        print(msgspec.json.encode(report("picker", sys.argv[1:], found, bench.rows)).decode())
        return 0
    for goal in found:
        print(f"{goal.name}: {goal.value:.2f} {goal.unit} (goal {goal.goal:g}){'' if goal.met else '  NOT MET'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
