"""TLS on real sockets, on asyncio's loop and on uvloop, as in the real process."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from services.frontend.auth import file_reload
from services.frontend.config import FrontendConfig, HttpConfig
from services.frontend.metrics import Metrics
from services.frontend.server import connections, port
from services.frontend.server.port import Port
from services.frontend.server.sse import ResponseBody
from services.frontend.server.tls import tls_context
from shared.config import load
from shared.errors import ConfigError
from tests.frontend.peers import MODEL, clients, world
from tests.servers import free_port

CERTIFICATES = Path(__file__).parents[1] / "certificates"
"""Self-signed certificates of localhost and their keys, for these tests only."""
DEADLINE_S = 60.0
GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE_BYTES = 32 << 20


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The directory of a certificate and key that a test may change."""
    install(tmp_path, "one")
    return tmp_path


def install(directory: Path, name: str) -> None:
    for kind in ("pem", "key"):
        shutil.copy(CERTIFICATES / f"{name}.{kind}", directory / f"tls.{kind}")


def settings(pair: Path, **more: Any) -> HttpConfig:
    return HttpConfig(port=free_port(), tls_cert=str(pair / "tls.pem"), tls_key=str(pair / "tls.key"), **more)


def trusting(*names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(CERTIFICATES / f"{name}.pem")
    return context


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


class Served:
    """A port that speaks TLS, with an application."""

    def __init__(self, config: HttpConfig) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.port = Port(config, Metrics(self.registry))
        self.written_bytes = 0
        self.ended = asyncio.Event()

    def app(self) -> web.Application:
        async def hello(request: web.Request) -> web.Response:
            return web.Response(text=f"hello over {request.scheme}")

        async def large(_request: web.Request) -> web.Response:
            return web.Response(body=bytes(LARGE_BYTES))

        async def endless(request: web.Request) -> web.StreamResponse:
            body = ResponseBody(request, {}, unread_s=0.2)
            try:
                while True:
                    event = bytes(1000)
                    if not (body.begun and body.try_send(event)):
                        await body.write(event)
                    self.written_bytes += len(event)
            finally:
                self.ended.set()

        app = web.Application(middlewares=[self.port.track_request])
        app.on_response_prepare.append(self.port.add_connection_header)
        app.router.add_get("/hello", hello)
        app.router.add_get("/large", large)
        app.router.add_get("/endless", endless)
        return app

    async def connect(self, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.config.port, ssl=context)

    async def plainly(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.config.port)

    async def asked(self, context: ssl.SSLContext) -> bytes:
        """Return the last line of the answer."""
        reader, writer = await self.connect(context)
        writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = await reader.read()
        writer.close()
        return answer.splitlines()[-1]

    async def opened(self, count: int) -> None:
        await until(lambda: len(self.port.connections) == count)

    async def stale(self, value: int) -> None:
        await until(lambda: self.registry.get_sample_value("headrace_stale_files", {"file": "tls"}) == value)

    def closed(self, reason: str) -> float:
        return self.registry.get_sample_value("headrace_closed_connections_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def served(config: HttpConfig) -> AsyncIterator[Served]:
    one = Served(config)
    async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as tasks:
        await one.port.start(tasks)
        async with one.port.open(one.app()):
            yield one
        for task in tasks._tasks:
            task.cancel()


def on(loop: Callable[[], asyncio.AbstractEventLoop], test: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test)


both_loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


@both_loops
def test_requests_are_answered_over_tls_one_after_another(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            reader, writer = await one.connect(trusting("one"))
            for _ in range(3):
                writer.write(GET)
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(16) == b"hello over https"
            assert len(one.port.connections) == 1
            writer.close()
            await one.opened(0)

    on(loop, test())


@both_loops
def test_a_request_that_comes_with_the_last_word_of_the_handshake_is_answered(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = trusting("one").wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            reader, writer = await one.plainly()
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
                    incoming.write(await reader.read(1 << 16))
            tls.write(GET)
            writer.write(outgoing.read())  # Finished and the request, in one segment
            answer = b""
            while not answer.endswith(b"hello over https"):
                incoming.write(await reader.read(1 << 16))
                with suppress(ssl.SSLWantReadError):
                    answer += tls.read(1 << 16)
            writer.close()

    on(loop, test())


@both_loops
def test_tls_before_1_2_is_refused(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            for version, spoken in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
                context = trusting("one")
                context.minimum_version = context.maximum_version = version
                _, writer = await one.connect(context)
                assert writer.get_extra_info("ssl_object").version() == spoken
                writer.close()
            hello = (
                bytes.fromhex("160301002f0100002b0301") + bytes(32) + bytes.fromhex("00000400050004010000" + "00" * 2)
            )
            reader, writer = await one.plainly()
            writer.write(hello)
            alert = await reader.read()
            assert not alert or alert[0] == 0x15
            writer.close()

    on(loop, test())


@both_loops
def test_a_new_certificate_is_every_new_connections_and_one_that_is_broken_changes_nothing(
    pair: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reload, "POLL_S", 0.01)

    async def test() -> None:
        async with served(settings(pair)) as one:
            reader, writer = await one.connect(trusting("one"))
            install(pair, "two")
            while True:
                with suppress(ssl.SSLCertVerificationError):
                    assert await one.asked(trusting("two")) == b"hello over https"
                    break
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n"), "the old connection goes on"
            writer.close()
            shutil.copy(CERTIFICATES / "one.pem", pair / "tls.pem")  # which is not that key's
            await one.stale(1)
            assert await one.asked(trusting("two")) == b"hello over https"
            install(pair, "one")
            await one.stale(0)
            assert await one.asked(trusting("one")) == b"hello over https"

    on(loop, test())


@both_loops
def test_a_connection_without_a_handshake_is_counted_and_makes_room(
    pair: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "EVICTABLE_AFTER_S", DEADLINE_S)

    async def test() -> None:
        async with served(settings(pair, connections=2)) as one:
            silent = [await one.plainly() for _ in range(2)]
            await one.opened(2)
            reader, writer = await one.plainly()
            with suppress(ConnectionError):
                assert await reader.read() == b"", "too soon: those before may be about to shake hands"
            writer.close()
            assert one.closed("full") == 1
            monkeypatch.setattr(connections, "EVICTABLE_AFTER_S", 0.0)
            assert await one.asked(trusting("one")) == b"hello over https"
            assert one.closed("room") == 1
            assert await silent[0][0].read() == b""
            for _, writer in silent:
                writer.close()
            await one.opened(0)

    on(loop, test())


@both_loops
def test_a_connection_without_a_handshake_is_closed_after_the_header_timeout(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair, header_s=0.05)) as one:
            reader, writer = await one.plainly()
            with suppress(ConnectionError):
                assert await reader.read() == b""
            await one.opened(0)
            assert one.closed("handshake") == 1
            writer.close()

    on(loop, test())


@both_loops
def test_rubbish_and_clients_that_disconnect_affect_no_other_client(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            for sent in (GET, b"", b"\x16\x03\x01", b"\x16\x03\x01\x00\x05hello", bytes(5000)):
                for reset in (False, True):
                    for _ in range(10):
                        client = socket.create_connection(("127.0.0.1", one.config.port))
                        client.setblocking(False)
                        client.send(sent)
                        if reset:
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        await asyncio.sleep(0)
                        client.close()
                assert await one.asked(trusting("one")) == b"hello over https"
            await one.opened(0)

    on(loop, test())


@both_loops
def test_a_client_that_reads_gets_all(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            reader, writer = await one.connect(trusting("one"))
            writer.write(GET.replace(b"hello", b"large"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: %d" % LARGE_BYTES in head
            assert len(await reader.readexactly(LARGE_BYTES)) == LARGE_BYTES
            writer.close()

    on(loop, test())


@both_loops
def test_a_client_that_does_not_read_its_stream_is_ended_and_little_was_kept_for_it(pair: Path, loop: Loop) -> None:
    async def test() -> None:
        async with served(settings(pair)) as one:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", one.config.port))
            _, writer = await asyncio.open_connection(
                sock=client, ssl=trusting("one"), server_hostname="127.0.0.1", limit=4096
            )
            writer.write(GET.replace(b"hello", b"endless"))
            await one.ended.wait()
            assert one.written_bytes < 2 << 20
            await one.opened(0)
            writer.transport.abort()

    on(loop, test())


@both_loops
def test_a_handshake_during_the_drain_is_served(pair: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "DRAIN_S", DEADLINE_S)

    async def test() -> None:
        async with served(settings(pair)) as one:
            asking = asyncio.create_task(one.asked(trusting("one")))
            await one.opened(1)
            await one.port.drain()
            assert await asking == b"hello over https"

    on(loop, test())


async def test_the_whole_frontend_speaks_tls_and_the_official_client_streams(
    directory: Path, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "one.pem"))
    async with world(directory, http=settings(pair), ready=False) as w:
        assert w.url.startswith("https://127.0.0.1:")
        w.say("grüße over TLS")
        async with clients(w) as (client, _), asyncio.timeout(DEADLINE_S):
            while not [model async for model in client.models.list()]:
                pass
            stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "grüße over TLS"


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("none.pem", "one.key", "No such file"),
        ("one.pem", "two.key", "KEY_VALUES_MISMATCH"),
        ("one.pem", "locked.key", "not a certificate and its key"),
        ("one.key", "one.key", "not a certificate and its key"),
        ("one.pem", "one.pem", "not a certificate and its key"),
    ],
)
def test_files_that_are_no_certificate_and_key_are_refused_with_a_reason(cert: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_context(CERTIFICATES / cert, CERTIFICATES / key)


def test_a_certificate_needs_its_key_and_the_other_way_round() -> None:
    for name in ("CERT", "KEY"):
        with pytest.raises(ConfigError, match="tls_cert and tls_key need each other"):
            load(FrontendConfig, environ={f"HEADRACE_HTTP_TLS_{name}": "x.pem"})
