"""A server that takes text alone, byte by byte as a test says, and the card of its worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from services.frontend.config import FrontendConfig, TextServersConfig
from shared import subjects
from shared.hashing import self_test
from shared.messages.cards import MODEL_CARD, KvLayout, ModelCard, Role
from shared.messages.codec import JSON_HEADER
from tests.frontend.peers import MODEL, NAMESPACE
from tests.servers import free_port

BLOCK_UNITS = 64
EVENTS = tuple(
    f'data: {{"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{choice}]}}\n\n'.encode()
    for choice in (
        '{"index":0,"delta":{"role":"assistant","content":"on"}}',
        '{"index":0,"delta":{"content":"ce"}}',
        '{"index":0,"delta":{},"finish_reason":"stop"}',
    )
)
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


WHOLE_STREAM = STREAM + b"".join(map(chunk, (*EVENTS, DONE))) + END


def whole(body: bytes, status: int = 200, kind: str = "application/json", more: str = "") -> bytes:
    """Return the bytes of an answer with this body; `more` are header lines, each with its end."""
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class Asked(NamedTuple):
    """A request that came."""

    path: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def says(answer: bytes, *, closes: bool = False) -> Script:
    """Return what answers each request with these bytes; with `closes` the connection ends then."""

    async def script(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if closes:
            writer.close()

    return script


class TextPeer:
    """One server; `script` answers each request. `port` may be that of one that has gone."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        """Without a script it answers a stream."""
        self.script = script or says(WHOLE_STREAM)
        self.port = port or free_port()
        self.asked: list[Asked] = []
        self.connections = self.open = 0
        self.left = asyncio.Event()
        """Set when a client ends a connection."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=16 << 20)

    async def kill(self) -> None:
        """End the server and its connections at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                    pairs = (line.partition(":") for line in head[1:] if line)
                    headers = {name.lower(): value.strip() for name, _, value in pairs}
                    body = await reader.readexactly(int(headers.get("content-length", "0")))
                    asked = Asked(head[0].split(" ")[1], headers, body)
                    self.asked.append(asked)
                    answering = asyncio.ensure_future(self.script(asked, writer))
                    gone = asyncio.ensure_future(reader.read(1))
                    try:
                        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
                        if not answering.done() or writer.is_closing():
                            break
                        answering.result()
                    finally:
                        answering.cancel()
                        gone.cancel()
                        await asyncio.gather(answering, gone, return_exceptions=True)
        finally:
            self.open -= 1
            self.left.set()
            writer.transport.abort()
            self._tasks.discard(task)


@asynccontextmanager
async def serving(*peers: TextPeer) -> AsyncIterator[None]:
    """Let these servers serve."""
    for peer in peers:
        await peer.start()
    try:
        yield
    finally:
        for peer in peers:
            await peer.kill()


def text_card(instance: str, url: str, model: str = MODEL, role: Role = "aggregated") -> dict[str, bytes]:
    """Return the card of a worker for a server at a URL with an IP address and a port."""
    card = ModelCard(
        model=model,
        role=role,
        instance=instance,
        path="",
        tokenizer_digest="text",
        hash_self_test=self_test(BLOCK_UNITS),
        context_length=1 << 20,
        vocab_size=1,
        block_size=BLOCK_UNITS,
        capacity_blocks=1024,
        kv_layout=KvLayout("float32", 1, 1, 1, BLOCK_UNITS),
        address=url.rpartition("/")[2],
        server=url,
    )
    return {subjects.model_key(NAMESPACE, model, instance): MODEL_CARD.encode(card, JSON_HEADER)}


def text_settings(**settings: object) -> FrontendConfig:
    return FrontendConfig(text=TextServersConfig(**settings))  # type: ignore[arg-type]
