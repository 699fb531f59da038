"""Runs a real frontend process among minimal peers: one router, one worker, and clients that count events.

    this process:  clients ── HTTP ──▶  the frontend's process
                   router, worker  ◀── nats-server ──▶  the same

Every stream runs until its client leaves. `Peers.step` makes one token for each of them, in one frame.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

from msgspec import Struct
from tokenizers import Tokenizer

from benchmarks.report import ROOT
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig, environment
from shared.discovery.file import FileDiscovery
from shared.hashing import pack_tokens, self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.messages.control import PONG, Pong
from shared.messages.frames import STEP_FRAME, Part, StepFrame
from shared.messages.generate import CANCEL, GENERATE, GENERATE_REPLY, Accepted, Generate
from shared.messages.select import SELECT, SELECT_REPLY, Overlap, Selected
from tests.servers import NatsServer, free_port
from tests.tiny_model import write_tiny_model

NAMESPACE = "bench"
MODEL = "tiny"
ROUTER, WORKER = "r" * 16, "a" * 16
BLOCK_SIZE = 16
CONTEXT = 1 << 20
MAX_TOKENS = 8192
"""The output limit of each request, more than any measurement needs; the frontend admits by it."""
TEXT = "The headrace carries the river's water to the wheel, and every drop of it turns the wheel once more. Voilà! "
MANY = 10**9
START_LIMIT_S = 60.0


class Peers:
    """A scripted router and a scripted worker."""

    def __init__(self, bus: NatsBus, directory: Path) -> None:
        self.tokens = 0
        """Tokens sent so far."""
        self.attempts = 0
        """Attempts so far; as many as streams, unless one was lost."""
        self._bus = bus
        self._directory = directory
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._text = [pack_tokens([token]) for token in tokenizer.encode(TEXT, add_special_tokens=False).ids]
        self._streams: dict[str, tuple[Generate, int]] = {}
        self._digest = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
        self._sequence = 0

    async def start(self, discovery: FileDiscovery) -> None:
        """Announce the router and the worker in the discovery."""
        receivers = {
            subjects.select(NAMESPACE, MODEL): self._select,
            subjects.control(NAMESPACE, "router", ROUTER): self._ping,
            subjects.worker(NAMESPACE, WORKER, "generate"): self._generate,
            subjects.worker(NAMESPACE, WORKER, "cancel"): self._cancel,
            subjects.control(NAMESPACE, "worker", WORKER): self._ping,
        }
        for subject, receive in receivers.items():
            await self._bus.subscribe(subject, receive)
        await discovery.register(self._entries)

    def _entries(self, epoch: int) -> dict[str, bytes]:
        layout = KvLayout("float32", 2, 2, 16, BLOCK_SIZE)
        sizes = (self_test(BLOCK_SIZE), CONTEXT, 320, BLOCK_SIZE, CONTEXT)
        card = ModelCard(MODEL, WORKER, str(self._directory), self._digest, *sizes, kv_layout=layout)
        services: tuple[tuple[ServiceName, str], ...] = (("router", ROUTER), ("worker", WORKER))
        both = {
            subjects.instance_key(NAMESPACE, service, name): INSTANCE.encode(
                Instance(NAMESPACE, service, name, epoch, "m", 1, 0.0, "0"), JSON_HEADER
            )
            for service, name in services
        }
        return both | {subjects.model_key(NAMESPACE, MODEL, WORKER): MODEL_CARD.encode(card, JSON_HEADER)}

    async def _select(self, message: Message) -> None:
        asked = SELECT.decode(message.payload)
        choice = Selected(asked.request, asked.attempt, WORKER, 0, ROUTER, Overlap(), "the only one")
        await self._bus.publish(message.reply, SELECT_REPLY.encode(choice))

    async def _ping(self, message: Message) -> None:
        await self._bus.publish(message.reply, PONG.encode(Pong(ROUTER, 1)))

    async def _generate(self, message: Message) -> None:
        generate = GENERATE.decode(message.payload)
        await self._bus.publish(message.reply, GENERATE_REPLY.encode(Accepted(generate.request, generate.attempt)))
        self._streams[generate.request] = generate, len(generate.tokens) // 4 - generate.prompt_tokens
        self.attempts += 1

    async def _cancel(self, message: Message) -> None:
        self._streams.pop(CANCEL.decode(message.payload).request, None)

    async def streaming(self, count: int) -> None:
        """Wait until `count` streams run. A step each second shows the frontend that the worker is not frozen."""
        async with asyncio.timeout(START_LIMIT_S):
            while len(self._streams) < count:
                await asyncio.sleep(1.0)
                await self.step()

    async def step(self) -> None:
        """Send one token for every stream."""
        if not self._streams:
            return
        parts: list[Part] = []
        for request, (generate, produced) in self._streams.items():
            parts.append(Part(request, generate.attempt, produced, self._text[produced % len(self._text)]))
            self._streams[request] = generate, produced + 1
        frontend = next(iter(self._streams.values()))[0].frontend
        frame = StepFrame(WORKER, 1, self._sequence, parts)
        self._sequence += 1
        self.tokens += len(parts)
        await self._bus.publish(subjects.stream(NAMESPACE, frontend), STEP_FRAME.encode(frame))


class StreamClient(asyncio.Protocol):
    """A client of one streamed chat, which counts its events."""

    def __init__(self, payload: bytes) -> None:
        self.events = 0
        self.ended = False
        self.transport: asyncio.Transport | None = None
        self._payload = payload

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.transport.write(self._payload)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.ended = True

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")


class FrontendProcess(Struct, frozen=True):
    """The measured frontend process."""

    pid: int
    port: int
    key: str = ""
    """The API key that the frontend requires; empty means none."""


async def connect_clients(frontend: FrontendProcess, count: int, prompt_tokens: int) -> list[StreamClient]:
    """Open `count` streams and send their requests."""
    loop = asyncio.get_running_loop()
    shown = f"Authorization: Bearer {frontend.key}\r\n" if frontend.key else ""
    clients: list[StreamClient] = []
    for number in range(count):
        content = f"{number:08d}" + "x" * (prompt_tokens - 8)
        asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
        body = json.dumps({**asked, "max_tokens": MAX_TOKENS}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{shown}Content-Length: {len(body)}\r\n\r\n"
        _, client = await loop.create_connection(
            partial(StreamClient, head.encode() + body), "127.0.0.1", frontend.port
        )
        clients.append(client)
    return clients


@asynccontextmanager
async def stack(
    key: str = "", trace_share: float | None = None, *, added: Mapping[str, str] | None = None, tree: Path = ROOT
) -> AsyncIterator[tuple[FrontendProcess, Peers]]:
    """Start everything and yield once the frontend is ready. It has a core of its own if the machine has two.

    With `key` the frontend requires that API key, with limits that the measurement does not reach. With `trace_share`
    it traces that share of requests; a collector in this process takes the spans. `added` has more settings, by the
    names of their environment variables. The frontend is that of `tree`, a checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        discovered = Path(folder) / "discovery"
        discovered.mkdir()
        directory = write_tiny_model(Path(folder) / "model", context_length=CONTEXT)
        server = NatsServer(Path(folder))
        server.start()
        try:
            bus = await connect(NatsConfig(url=server.url), "peers")
            discovery = FileDiscovery(discovered)
            peers = Peers(bus, directory)
            await peers.start(discovery)
            keys = Path(folder) / "keys.toml"
            if key:
                digest = hashlib.sha256(key.encode()).hexdigest()
                limits = f"requests_per_minute = {MANY}, tokens_per_minute = {MANY}, concurrency = {MANY}"
                keys.write_text(f'bench = {{ sha256 = "{digest}", {limits} }}\n', encoding="utf-8")
            asks = ["--access-keys-file", str(keys)] if key else []
            async with await asyncio.start_server(take_spans, "127.0.0.1", free_port()) as collector:
                if trace_share is not None:
                    port = collector.sockets[0].getsockname()[1]
                    asks += ["--trace-endpoint", f"http://127.0.0.1:{port}/v1/traces"]
                    asks += ["--trace-sample", str(trace_share)]
                async with _process(server.url, discovered, asks, added or {}, tree) as (pid, port):
                    frontend = FrontendProcess(pid, port, key)
                    yield frontend, peers
            await discovery.close()
            await bus.drain()
        finally:
            server.stop()


async def take_spans(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request of one exporter with 200."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def _process(
    nats_url: str, discovered: Path, more: list[str], added: Mapping[str, str], tree: Path
) -> AsyncIterator[tuple[int, int]]:
    """Start the process; yield its PID and its port."""
    port = free_port()
    flags = [
        *("--namespace", NAMESPACE, "--nats-url", nats_url, "--observe-log-level", "warning", "--http-port", str(port)),
        *("--discovery-backend", "file", "--discovery-path", str(discovered), "--limits-drain-s", "0.1"),
        *("--limits-requests", "8192"),
        *more,
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.frontend", *flags), env=environment() | dict(added), cwd=tree
    )
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(process.pid, cores[:1])
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await asyncio.to_thread(_ready, port):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield process.pid, port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0) as answer:
            return bool(json.load(answer)["ready"])
    except OSError:
        return False
