"""The HTTP port: accepts connections, bounds them in number and time, and stops without losing one.

    open ──▶ notice ──▶ last call ──▶ closed
             │          │             └ connections without a request are closed; what still runs at the end is cut off
             │          └ nothing new is accepted; what has been is served
             └ all is served, for `drain_delay_s`; each answer has `Connection: close` from here on

Several processes may share the port (SO_REUSEPORT). The kernel gives each connection to one of them when it is made, so
one that stops accepts what waits for it before it closes its socket. (A handshake that is half done in that moment is
refused, unless net.ipv4.tcp_migrate_req is 1; on one machine there is no such moment.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.frontend.config import HttpConfig
from services.frontend.metrics import Metrics
from services.frontend.protocol.errors import Failure, failure, failure_of
from services.frontend.server.connections import CloseReason, Connections
from services.frontend.server.tls import Acceptor, Certificate, Handshake
from shared.errors import ConfigError, Unavailable
from shared.runtime.observe import advertised

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; net.core.somaxconn may be less."""
DRAIN_S = 1.0
"""How long clients that keep a connection may still ask on it, to be told with the answer that it closes."""
LINGER_S = 2.0
"""What a refused request goes on to send is read for so long, or its answer would be lost with the connection."""
SWEEP_S = 0.5
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a body in chunks that has no trailers, with the end of the line before it."""
_NEVER_S = 1e9

_log = logging.getLogger(__name__)
_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Who speaks no HTTP gets a 400 from aiohttp, who does not read is cut off; a traceback each would let anyone fill
    the log."""
    wrong = record.exc_info[1] if record.exc_info else None
    return not isinstance(wrong, HttpProcessingError | web.RequestPayloadError | ConnectionError)


_aiohttp_log.addFilter(_is_worth_logging)
_no_log = logging.getLogger(f"{__name__}.access")
_no_log.disabled = True


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Port:
    """One listening process's end. Its middleware is to be the application's outermost."""

    def __init__(self, config: HttpConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self.connections: Connections[AnyConnection] = Connections(
            limit=config.connections, idle_s=config.idle_s, header_s=config.header_s
        )
        self._server: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        """Where it speaks TLS."""
        self._connect: Callable[[Handshake | None], _HttpConnection]
        self._certificate = Certificate(config, metrics) if config.tls_cert else None
        self._tasks: asyncio.TaskGroup
        """Of handshakes."""
        self._sweeping: asyncio.TimerHandle
        self._swept_s = self._now()
        self._spared = False
        """At the last look, since that came late."""
        self._ending = False
        self._empty = asyncio.Event()
        """Set when the last connection goes."""

    # --- what aiohttp tells

    @web.middleware
    async def track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Knows which connections have a request."""
        connection = request.protocol
        self.connections.request_began(connection)
        try:
            return await handler(request)
        finally:
            self.connections.request_ended(connection, self._now())
            if self._ending:
                connection.close()  # when it is answered; a stream that began before could not say so in its head

    async def add_connection_header(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `on_response_prepare`: the last answer of a connection says so."""
        if self._ending or cast(_HttpConnection, request.protocol).may_leak(request):
            response.force_close()
            response.headers["Connection"] = "close"

    def admit_connection(self, connection: AnyConnection) -> bool:
        """Whether a new connection may stay; at the limit one that is idle makes room for it."""
        now = self._now()
        if (longest := self.connections.to_evict(now)) is not None:
            self._close(longest, "room")
        if self.connections.full:
            self._metrics.closed_connections.labels("full").inc()
            return False
        self.connections.add(connection, now)
        self._metrics.connections.set(len(self.connections))
        return True

    def handshake_done(self, connection: Handshake) -> None:
        """Its hands are shaken; what it becomes is counted at once."""
        self.connections.remove(connection)

    def handshake_failed(self) -> None:
        """One was not shaken hands with: it spoke no TLS, or was slow, or went."""
        self._metrics.closed_connections.labels("handshake").inc()

    def bytes_received(self, connection: AnyConnection) -> None:
        """Bytes came on it."""
        self.connections.bytes_received(connection, self._now())

    def connection_closed(self, connection: AnyConnection) -> None:
        """It is closed."""
        self.connections.remove(connection)
        self._metrics.connections.set(len(self.connections))
        if not len(self.connections):
            self._empty.set()

    # --- its life

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Where it speaks TLS: read the certificate, and follow it. Raises ConfigError."""
        if self._certificate is not None:
            self._tasks = tasks
            await self._certificate.load_and_watch(tasks)

    @asynccontextmanager
    async def open(self, app: web.Application) -> AsyncIterator[str]:
        """Listens while the context is open; gives the base URL. Raises ConfigError if it cannot."""
        config, loop = self._config, asyncio.get_running_loop()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        self._connect = partial(_HttpConnection, self, runner.server, loop)
        tls = self._certificate is not None
        self._sweep()
        try:
            try:
                self._server = await loop.create_server(
                    *(partial(self._connect, None), config.host, config.port),
                    reuse_port=config.reuse_port,
                    backlog=BACKLOG,
                    start_serving=not tls,
                )
                if tls:
                    self._acceptor = Acceptor(self._server, BACKLOG, self._begin_handshake)
            except OSError as wrong:
                raise ConfigError(f"http: cannot listen on {config.host}:{config.port}: {wrong.strerror}") from None
            host, port = advertised(config.host), self._server.sockets[0].getsockname()[1]
            scheme = "https" if tls else "http"
            url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            _log.info("listening on %s", url)
            yield url
        finally:
            self._sweeping.cancel()
            await self._stop_accepting()
            await runner.cleanup()

    def _begin_handshake(self, accepted: socket.socket) -> None:
        assert self._certificate is not None
        handshake = Handshake(accepted)
        plain = partial(self._connect, handshake)
        handshake.begin(self, self._certificate.context, plain, self._config.header_s, self._tasks)

    async def announce_closing(self) -> None:
        """Accepts connections for `drain_delay_s` more; each answer says that its connection closes."""
        self._ending = True
        await asyncio.sleep(self._config.drain_delay_s)

    async def drain(self) -> None:
        """Accepts no more, and returns when those who keep a connection have had their time to ask on it once more."""
        self._ending = True
        await self._stop_accepting()
        if len(self.connections):
            self._empty.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._empty.wait()
        for connection in self.connections.idle:
            connection.force_close()

    async def _stop_accepting(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if self._acceptor is not None:
            self._acceptor.close()
        accepted: list[socket.socket] = []
        for each in server.sockets:
            with socket.socket(fileno=os.dup(each.fileno())) as listener:  # uvloop's own has no `accept`
                listener.setblocking(False)
                with suppress(OSError):  # BlockingIOError: nobody waits any more
                    while True:
                        accepted.append(listener.accept()[0])
                listener.shutdown(socket.SHUT_RD)  # now: uvloop may close its own a turn later
        server.close()
        for connection in accepted:
            if self._certificate is None:
                await asyncio.get_running_loop().connect_accepted_socket(partial(self._connect, None), connection)
            else:
                connection.setblocking(False)
                self._begin_handshake(connection)
        await asyncio.sleep(0)  # those that uvloop accepted just before come in the loop's next turn

    def _sweep(self) -> None:
        """Where this process stood still, timers come before what was sent to it meanwhile: that is read first."""
        since_s, self._swept_s = self._swept_s, self._now()
        self._spared = not self._spared and self._swept_s - since_s > 2 * SWEEP_S
        if not self._spared:
            for connection, why in list(self.connections.pop_overdue(self._swept_s)):
                self._close(connection, why)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _close(self, connection: AnyConnection, why: CloseReason) -> None:
        self.connections.remove(connection)
        self._metrics.closed_connections.labels(why).inc()
        transport = connection.transport
        if why == "header" and transport is not None:
            transport.write(_LATE)
        connection.force_close()
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()  # its client does not read: closing would wait for it, and nothing bounds that


class _HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, which tells the port what happens. The port bounds its idle time."""

    __slots__ = ("_handshake", "_last_bytes", "_port")

    def __init__(
        self, port: Port, server: web.Server, loop: asyncio.AbstractEventLoop, handshake: Handshake | None
    ) -> None:
        """`handshake` is what was counted as this connection until it is made."""
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=_NEVER_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # it would be done in the loop, for who is refused too
            access_log=_no_log,
            logger=_aiohttp_log,
        )
        self._port = port
        self._handshake = handshake
        self._last_bytes = b""
        """The last bytes that came, as many as LAST_CHUNK has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._handshake is not None:
            self._port.handshake_done(self._handshake)
        if self._port.admit_connection(self):
            super().connection_made(transport)
        else:
            cast(asyncio.Transport, transport).write(_FULL)  # uvloop's is not made from the class
            transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's, which it logs, in OpenAI's shape."""
        plain = super().handle_error(request, status, exc, message)
        said = plain.text if isinstance(plain, web.Response) and status < 500 else None
        said = said and re.split("[:\n]", said, maxsplit=1)[0]  # behind it stands what was sent, perhaps a key
        kind = "invalid_request_error" if status < 500 else "server_error"
        wrong = failure(status, said or "the server has failed", kind)
        response = _NoServerHeader(status=status, body=wrong.payload, content_type="application/json")
        response.force_close()
        return response

    def data_received(self, data: bytes) -> None:
        if data:  # aiohttp calls it itself with none
            self._port.bytes_received(self)
            self._last_bytes = (self._last_bytes + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        super().data_received(data)

    def may_leak(self, request: web.Request) -> bool:
        """Whether the next request may get a header out of this one: then this must be the connection's last.

        aiohttp's parser (3.14.5) takes the last trailer of a body in chunks for the first header of the next request. A
        request has no trailers where it is whole, LAST_CHUNK came last, and no other request came meanwhile: `0` is
        no trailer, which has a colon.
        """
        if "Transfer-Encoding" not in request.headers:
            return False
        whole = request.content.is_eof() and self._last_bytes == LAST_CHUNK
        return not whole or bool(self._messages) or self._upgraded

    def connection_lost(self, exc: BaseException | None) -> None:
        self._port.connection_closed(self)
        super().connection_lost(exc)


AnyConnection = web.RequestHandler | Handshake


class _NoServerHeader(web.Response):
    """Does not say what server this is, where no application is asked for its headers."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop("Server", None)


def _response(reason: str, wrong: Failure) -> bytes:
    """A whole HTTP response that closes its connection."""
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(wrong.payload)),
        "Connection": "close",
        **wrong.headers,
    }
    lines = [f"HTTP/1.1 {wrong.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + wrong.payload


_LATE = _response(
    "Request Timeout",
    failure(408, "the request's headers did not come in time", "invalid_request_error", code="request_timeout"),
)
_FULL = _response(
    "Service Unavailable", failure_of(Unavailable("this frontend has as many connections as it may have"))
)
