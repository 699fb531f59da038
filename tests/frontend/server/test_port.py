"""Ill-behaved clients and shutdowns, on real sockets and uvloop, as in the real process."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import uvloop
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from
from prometheus_client import CollectorRegistry

from services.frontend.config import HttpConfig
from services.frontend.metrics import Metrics
from services.frontend.server import connections as connections_module
from services.frontend.server import port
from services.frontend.server.port import Port
from shared.errors import ConfigError
from tests.servers import free_port

DEADLINE_S = 60.0
GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b"5\r\nhello\r\n"


P = ParamSpec("P")


def on_uvloop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run on uvloop: accepting connections and closing sockets differ from asyncio's own loop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Served:
    """A port with an application that answers at once or when the test lets it."""

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.port = Port(config, Metrics(self.registry))
        self.asked = asyncio.Event()
        self.release = asyncio.Event()

    def app(self) -> web.Application:
        async def hello(_request: web.Request) -> web.Response:
            return web.Response(text="hello")

        async def large(_request: web.Request) -> web.Response:
            return web.Response(body=bytes(16 << 20))

        async def wait(_request: web.Request) -> web.Response:
            self.asked.set()
            await self.release.wait()
            return web.Response(text="waited")

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            self.asked.set()
            await self.release.wait()
            await response.write_eof(b"streamed")
            return response

        async def echo(request: web.Request) -> web.Response:
            return web.Response(body=await request.read(), headers={"Seen": "; ".join(request.headers)})

        app = web.Application(middlewares=[self.port.track_request])
        app.on_response_prepare.append(self.port.add_connection_header)
        app.router.add_get("/hello", hello)
        app.router.add_get("/large", large)
        app.router.add_get("/wait", wait)
        app.router.add_get("/stream", stream)
        app.router.add_post("/stream", stream)
        app.router.add_post("/echo", echo)
        return app

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.config.host, self.config.port)

    def closed(self, reason: str) -> float:
        return self.registry.get_sample_value("headrace_closed_connections_total", {"reason": reason}) or 0.0

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if holds():
                    return
                await asyncio.sleep(0)

    async def opened(self, count: int) -> None:
        await self.until(lambda: len(self.port.connections) == count)


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    config = HttpConfig(port=free_port(), **settings)
    one = Served(config)
    async with asyncio.timeout(3 * DEADLINE_S), one.port.open(one.app()):
        yield one


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the head and the body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return head, await reader.readexactly(length)


@on_uvloop
async def test_a_port_that_is_taken_is_a_config_error_unless_it_is_shared() -> None:
    async with served() as one:
        with pytest.raises(ConfigError, match=f"http: cannot listen on 127.0.0.1:{one.config.port}"):
            async with Port(one.config, Metrics(CollectorRegistry())).open(web.Application()):
                pass
    async with (
        served(reuse_port=True) as one,
        Port(one.config, Metrics(CollectorRegistry())).open(web.Application()) as url,
    ):
        assert url.endswith(f":{one.config.port}")


@on_uvloop
async def test_half_a_header_is_answered_408_however_slowly_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "SWEEP_S", 0.02)
    async with served(header_s=0.2) as one:
        reader, writer = await one.connect()
        answered = asyncio.create_task(answer(reader))
        for byte in GET:
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait([answered], timeout=0.05)
            if done:
                break
        head, body = answered.result()
        assert b" 408 " in head
        assert b"request_timeout" in body
        assert one.closed("header") == 1
        writer.close()


@on_uvloop
async def test_what_came_while_the_process_stood_still_is_answered_before_idle_connections_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "SWEEP_S", 0.05)
    async with served(idle_s=1.0) as one:
        reader, writer = await one.connect()
        await one.opened(1)
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sending:
            sending.send(GET)
        time.sleep(1.5)  # noqa: ASYNC251 - as SIGSTOP does
        assert (await answer(reader))[1] == b"hello"
        writer.close()


@on_uvloop
async def test_idle_connections_go_after_their_time_before_and_after_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "SWEEP_S", 0.02)
    async with served(idle_s=1.0) as one:
        silent, silent_writer = await one.connect()
        reader, writer = await one.connect()
        writer.write(GET)
        assert (await answer(reader))[1] == b"hello"
        assert await reader.read() == b""
        assert await silent.read() == b""
        assert one.closed("idle") == 2
        assert len(one.port.connections) == 0
        writer.close()
        silent_writer.close()


@on_uvloop
async def test_a_client_that_reads_no_answer_keeps_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "SWEEP_S", 0.02)
    async with served(idle_s=0.5) as one:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((one.config.host, one.config.port))
            await one.opened(1)
            before = open_files()
            client.send(GET.replace(b"hello", b"large"))
            await one.until(lambda: one.closed("idle") == 1)
            await one.until(lambda: open_files() < before)


@on_uvloop
async def test_a_request_that_takes_longer_than_connections_may_be_idle_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "SWEEP_S", 0.01)
    async with served(idle_s=1.0, header_s=1.0) as one:
        reader, writer = await one.connect()
        silent, silent_writer = await one.connect()
        writer.write(GET.replace(b"hello", b"wait"))
        assert await silent.read() == b""  # so long has passed
        one.release.set()
        assert (await answer(reader))[1] == b"waited"
        writer.close()
        silent_writer.close()


@on_uvloop
async def test_ten_thousand_idle_connections_keep_no_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "EVICTABLE_AFTER_S", 0.0)
    limit, crowd = 300, 10_000
    async with served(connections=limit) as one:
        busy_reader, busy_writer = await one.connect()
        busy_writer.write(GET.replace(b"hello", b"wait"))
        await one.asked.wait()
        idle: list[socket.socket] = []
        loop = asyncio.get_running_loop()
        for number in range(crowd):
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, (one.config.host, one.config.port))
            idle.append(connection)
            if number % 1000 == 999:
                reader, writer = await one.connect()
                writer.write(GET)
                assert (await answer(reader))[1] == b"hello"
                writer.close()
                assert len(one.port.connections) <= limit
                for gone in idle[: -2 * limit]:
                    gone.close()
                del idle[: -2 * limit]
        assert one.closed("room") > crowd - 2 * limit
        assert one.closed("full") == 0
        one.release.set()
        assert (await answer(busy_reader))[1] == b"waited"
        busy_writer.close()
        for connection in idle:
            connection.close()


@on_uvloop
async def test_where_all_connections_are_busy_a_new_one_is_answered_503_before_it_asks() -> None:
    async with served(connections=2) as one:
        pairs = [await one.connect() for _ in range(2)]
        for _, writer in pairs:
            writer.write(GET.replace(b"hello", b"wait"))
        await one.asked.wait()
        await one.opened(2)
        await one.until(lambda: not one.port.connections.idle)
        reader, extra = await one.connect()
        head, body = await answer(reader)
        assert b" 503 " in head
        assert b"Retry-After: 1" in head
        assert b"reached its limit of connections" in body
        assert one.closed("full") == 1
        one.release.set()
        for reader, writer in pairs:
            assert (await answer(reader))[1] == b"waited"
            writer.close()
        extra.close()


@on_uvloop
async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(GET * 100)
        for _ in range(100):
            assert (await answer(reader))[1] == b"hello"
        assert len(one.port.connections) == 1
        writer.close()


@on_uvloop
async def test_a_compressed_body_is_never_decompressed() -> None:
    """aiohttp would decompress in the event loop, even for a refused request; a few MB would stop the loop for
    seconds."""
    async with served() as one:
        for encoding, body in (("gzip", gzip.compress(bytes(1 << 20))), ("deflate", zlib.compress(bytes(1 << 20)))):
            reader, writer = await one.connect()
            head = f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
            assert (await answer(reader))[1] == body
            writer.close()


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize(
    "trailers",
    [
        b"Authorization: Bearer x\r\n",
        b"A: b\r\nX-Request-Id: evil\r\n",
        b"A: \r\n",
        b"A: 0\r\n",
        b"A: b\r\n" * 20,
    ],
)
@on_uvloop
async def test_a_trailer_does_not_become_the_first_header_of_the_next_request(trailers: bytes, pipelined: bool) -> None:
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(CHUNKED + BODY + b"0\r\n" + trailers + b"\r\n")
        if pipelined:
            writer.write(CHUNKED + BODY + b"0\r\n\r\n")
        head, body = await answer(reader)
        assert (body, b"Connection: close" in head) == (b"hello", True)
        assert await reader.read() == b""
        writer.close()


@on_uvloop
async def test_a_trailer_that_comes_after_its_answer_began_is_the_connections_last() -> None:
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(CHUNKED.replace(b"echo", b"stream"))
        assert b"Connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"0\r\nHost: y\r\n\r\n" + GET)
        await one.asked.wait()
        one.release.set()
        assert await reader.read() == b"8\r\nstreamed\r\n0\r\n\r\n"
        writer.close()


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\n", b""])
@on_uvloop
async def test_a_request_in_chunks_without_trailers_keeps_its_connection(end: bytes) -> None:
    """This holds wherever the last chunk is cut."""
    async with served() as one:
        reader, writer = await one.connect()
        last = b"0\r\n\r\n"
        for body in (BODY, BODY + b"2;a=b\r\n, \r\n" + BODY, b""):
            writer.write(CHUNKED + body + end)
            await asyncio.sleep(0)
            writer.write(last.removeprefix(end))
            head, echoed = await answer(reader)
            assert b"Connection: close" not in head
            assert b"Seen: Host; Transfer-Encoding\r\n" in head
            assert echoed == (body and (b"hello" if body == BODY else b"hello, hello"))
        writer.close()


PIECES = (
    *(b"0", b"\r\n", b"\r", b"\n", b":", b" ", b"\t", b";", b"=", b'"', b"a", b"a: b", b"a: b\r\n", b"0\r\n", BODY),
    *(b";a=b", b'0;a="', b'"\r\n', b"7\r\n\r\n0\r\n\r\n\r\n", GET, CHUNKED),
)


@given(pieces=lists(sampled_from(PIECES), max_size=8))
@settings(max_examples=300)
def test_a_whole_request_that_ends_in_its_last_chunk_has_no_trailer(pieces: list[bytes]) -> None:
    """`_HttpConnection` relies on this: aiohttp's parser then has nothing left for the next request."""
    with asyncio.Runner() as runner:
        runner.run(_parse(CHUNKED + b"".join(pieces) + b"0\r\n\r\n"))


async def _parse(sent: bytes) -> None:
    parser = HttpRequestParser(BaseProtocol(asyncio.get_running_loop()), asyncio.get_running_loop(), 1 << 16)
    try:
        messages, upgraded, _ = parser.feed_data(sent)
    except HttpProcessingError:
        return
    if len(messages) > 1 or not messages[0][1].is_eof() or not sent.endswith(port.LAST_CHUNK):
        return
    assert not upgraded
    [(message, _)], _, _ = parser.feed_data(GET)
    assert dict(message.headers) == {"Host": "x"}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /hello HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET /" + b"h" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["long field", "many fields", "long line"],
)
@on_uvloop
async def test_huge_heads_are_answered_400(head: bytes) -> None:
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(head)
        assert b" 400 " in await reader.readline()
        said = await reader.read()
        assert b"Too many headers" in said or b"Got more than 8190 bytes in one header or in the path" in said
        writer.close()
        await one.opened(0)


@on_uvloop
async def test_a_drained_port_answers_what_was_connected_and_says_that_it_closes() -> None:
    async with served() as one:
        keeping, keeping_writer = await one.connect()
        keeping_writer.write(GET)
        assert b"Connection: close" not in (await answer(keeping))[0]
        waiting, waiting_writer = await one.connect()
        waiting_writer.write(GET.replace(b"hello", b"wait"))
        await one.asked.wait()
        drain = asyncio.create_task(one.port.drain())
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await one.connect()
        keeping_writer.write(GET)
        head, body = await answer(keeping)
        assert (b"Connection: close" in head, body) == (True, b"hello")
        assert await keeping.read() == b""
        one.release.set()
        head, body = await answer(waiting)
        assert (b"Connection: close" in head, body) == (True, b"waited")
        await drain
        assert len(one.port.connections) == 0
        keeping_writer.close()
        waiting_writer.close()


@on_uvloop
async def test_a_stream_that_began_before_the_drain_closes_its_connection_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port, "DRAIN_S", 0.05)
    async with served() as one:
        reader, writer = await one.connect()
        writer.write(GET.replace(b"hello", b"stream"))
        await one.asked.wait()
        await one.port.drain()
        one.release.set()
        assert b"streamed" in await reader.read()
        writer.close()


@on_uvloop
async def test_a_connection_without_a_request_is_closed_after_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "DRAIN_S", 0.05)
    async with served() as one:
        reader, writer = await one.connect()
        await one.opened(1)
        await one.port.drain()
        assert await reader.read() == b""
        writer.close()


@on_uvloop
async def test_a_connection_that_waits_to_be_accepted_when_the_port_closes_is_served() -> None:
    async with served() as one:
        waiting = []
        for _ in range(50):  # blocking calls: the loop cannot accept meanwhile
            connection = socket.create_connection((one.config.host, one.config.port))
            connection.sendall(GET)
            waiting.append(connection)
        await one.port.drain()
        for connection in waiting:
            connection.setblocking(True)
            assert b"200 OK" in await asyncio.to_thread(connection.recv, 4096)
            connection.close()


@on_uvloop
async def test_ports_that_share_lose_no_request_while_they_come_and_go() -> None:
    async with served(reuse_port=True) as staying:
        ended = asyncio.Event()
        answered = 0

        async def ask() -> None:
            nonlocal answered
            while not ended.is_set():
                reader, writer = await staying.connect()
                writer.write(GET)
                assert (await answer(reader))[1] == b"hello"
                answered += 1
                writer.close()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(ask())
            for _ in range(20):
                going = Served(staying.config)
                async with going.port.open(going.app()):
                    before = answered
                    await going.until(lambda before=before: answered >= before + 40)  # type: ignore[misc]
                    await going.port.drain()
            ended.set()
