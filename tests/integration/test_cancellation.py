"""A client goes: its worker's blocks are freed and its router's reservation is released, long before its answer ends.

Real processes on a real NATS; the engine takes a GPU's time, so that a prompt's computation and an answer last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import getrandbits
from typing import Literal, get_args
from urllib.parse import urlsplit

import nats
import pytest
from nats.aio.msg import Msg

from services.frontend.server.nats_api import PROBE_HEADER
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.messages.load import LOAD_REPORT, LoadReport
from tests.integration.fleet import Fleet, fleet
from tests.tiny_model import write_tiny_model

NAMESPACE = "cancellation"
LIMIT_S = 180.0
"""Seconds. An answer lasts 100 s, so what is freed within this limit was freed because the client went."""

Door = Literal["http", "http whole", "nats", "nats whole"]
Place = Literal["queue", "prefill", "decode"]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    """One of each; the worker computes one request at a time, 2,000 tokens of a prompt a second."""
    folder = tmp_path_factory.mktemp("cancellation")
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(folder / "discovery"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        engine = ("--model", str(write_tiny_model(folder / "tiny")), "--engine", "simulated", "--max-running", "1")
        slow = ("--simulated-token-s", "0.0005", "--simulated-weights-s", "0.02", "--simulated-output-tokens", "0")
        one.start("worker", "worker", *engine, *slow, "--simulated-context-length", "60000")
        one.start("frontend", "frontend")
        one.wait_ready()
        yield one


class Reports:
    """The worker's own."""

    def __init__(self) -> None:
        self._last: LoadReport | None = None
        self._came = asyncio.Event()

    async def take(self, message: Message) -> None:
        self._last = LOAD_REPORT.decode(message.payload)
        self._came.set()

    async def until(self, holds: Callable[[LoadReport], bool]) -> None:
        """A report that says so, from now on."""
        self._last = None
        async with asyncio.timeout(LIMIT_S):
            while self._last is None or not holds(self._last):
                self._came.clear()
                await self._came.wait()


@asynccontextmanager
async def reports(nats_url: str) -> AsyncIterator[Reports]:
    bus = await connect(NatsConfig(url=nats_url), "test")
    heard = Reports()
    await bus.subscribe(subjects.worker(NAMESPACE, "*", "load"), heard.take)
    try:
        yield heard
    finally:
        await bus.drain()


class Client:
    """One request by either door; `go` ends its connection."""

    def __init__(self, go: Callable[[], None], first: asyncio.Future[bytes]) -> None:
        self.go = go
        self.first = first
        """The first piece of the answer with text."""


def body(prompt_tokens: int, *, streams: bool) -> bytes:
    """A prompt that shares nothing with another one, and an answer of 5,000 tokens."""
    prompt = [3 + getrandbits(8) for _ in range(prompt_tokens)]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 5000, "ignore_eos": True, "stream": streams}
    return json.dumps(asked).encode()


@asynccontextmanager
async def asking(services: Fleet, nats_url: str, door: Door, payload: bytes) -> AsyncIterator[Client]:
    first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def heard(piece: bytes) -> None:
        if b'"error"' in piece and not first.done():
            first.set_exception(AssertionError(f"refused: {piece[:500]!r}"))
        if b'"text":"' in piece and b'"text":""' not in piece and not first.done():
            first.set_result(piece)

    if door.startswith("http"):
        url = urlsplit(services.services["frontend"].url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)

        async def read() -> None:
            with suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    heard(piece)

        reading = asyncio.create_task(read())
        try:
            # A client that ends says so (FIN); one that crashed with data unread resets.
            yield Client(writer.close if door == "http" else writer.transport.abort, first)
        finally:
            writer.transport.abort()
            await reading
    else:
        client = await nats.connect(nats_url)

        async def take(message: Msg) -> None:
            heard(message.data)

        inbox = client.new_inbox()
        listening = await client.subscribe(inbox, cb=take)
        headers = {PROBE_HEADER: "1"} if door == "nats whole" else None
        await client.publish(subjects.client(NAMESPACE, "completions"), payload, reply=inbox, headers=headers)
        leaving: list[asyncio.Task[None]] = []
        try:
            yield Client(lambda: leaving.append(asyncio.create_task(listening.unsubscribe())), first)
        finally:
            await asyncio.gather(*leaving)
            await client.close()


async def reserved(services: Fleet, count: int) -> None:
    """Wait until the router has `count` reservations."""
    router = services.services["router"]
    while await asyncio.to_thread(router.metric, "headrace_reservations") != count:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", get_args(Place))
@pytest.mark.parametrize("door", get_args(Door))
async def test_a_client_that_goes_frees_its_blocks_and_its_reservation(
    services: Fleet, nats_url: str, door: Door, place: Place
) -> None:
    streams = not door.endswith("whole")
    async with AsyncExitStack() as opened:
        heard = await opened.enter_async_context(reports(nats_url))
        await heard.until(lambda report: not report.attempts)
        others = 0
        if place == "queue":
            blocker = await opened.enter_async_context(asking(services, nats_url, "http", body(16, streams=True)))
            await asyncio.wait_for(blocker.first, LIMIT_S)
            others = 1
        prompt_tokens = 40_000 if place == "prefill" else 16
        client = await opened.enter_async_context(
            asking(services, nats_url, door, body(prompt_tokens, streams=streams))
        )
        match place:
            case "queue":
                await heard.until(lambda report: report.waiting == 1)
            case "prefill":
                await heard.until(lambda report: report.held_blocks > 100 and report.waiting_tokens > 10_000)
            case "decode":
                await heard.until(lambda report: report.running == 1 and report.waiting_tokens == 0)
                if streams:
                    await asyncio.wait_for(client.first, LIMIT_S)
        if place != "decode":
            assert not client.first.done()
        client.go()
        async with asyncio.timeout(LIMIT_S):
            if others:
                await heard.until(lambda report: (report.running, report.waiting) == (1, 0))
            else:
                await heard.until(lambda report: not report.attempts and not report.held_blocks)
            await reserved(services, others)


async def test_how_long_it_takes_stands_in_the_metrics(services: Fleet) -> None:
    frontend = services.services["frontend"]
    text = {
        name: frontend.metric(f"headrace_{name}")
        for name in ("cancellation_seconds_count", "disconnected_clients_total")
    }
    assert text["cancellation_seconds_count"] >= 1
    assert text["disconnected_clients_total"] >= text["cancellation_seconds_count"]
