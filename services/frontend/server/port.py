"""The HTTP port: accepts connections, limits their number and idle time, and shuts down without losing one.

    open ──▶ announce_closing ──▶ drain ──▶ closed
             │                    │         └ requests that still run are cut off
             │                    └ no new connections; the requests of open ones are served, idle ones are closed
             └ all requests are served, for `drain_delay_s`; each answer has `Connection: close` from here on

Several processes may share the port (SO_REUSEPORT). The kernel assigns each connection to one of them when it is made,
so a process that stops accepts what the kernel holds for it before it closes its socket. (A TCP handshake that is half
done at that moment is refused, unless net.ipv4.tcp_migrate_req is 1; on one machine there is no such moment.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Literal, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from services.frontend.config import HttpConfig
from services.frontend.metrics import Metrics
from services.frontend.protocol.errors import Failure, failure, failure_of
from services.frontend.server.connections import CloseReason, Connections
from services.frontend.server.tls import SHUTDOWN_S, Acceptor, Handshake, certificate
from shared.errors import ConfigError, Unavailable
from shared.runtime.observe import advertised

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted; net.core.somaxconn may lower it."""
UNSENT_BYTES = 16 << 10
"""Bytes of a connection that the kernel holds beyond the client's window; its own default would be 4 MiB."""
DRAIN_S = 1.0
"""Seconds in which clients may send one more request on a connection that they keep open, whose answer says that it
closes."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused request is still read; without that its answer could be lost with the
connection."""
SWEEP_S = 0.5
"""Seconds between two checks for connections that have waited too long."""
LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a chunked body without trailers, including the end of the line before it."""
_NEVER_S = 1e9

_log = logging.getLogger(__name__)
_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop tracebacks that clients cause, or any client could fill the log: one that speaks no HTTP gets a 400 from
    aiohttp, and one that does not read is cut off."""
    wrong = record.exc_info[1] if record.exc_info else None
    return not isinstance(wrong, HttpProcessingError | web.RequestPayloadError | ConnectionError)


_aiohttp_log.addFilter(_is_worth_logging)
_no_log = logging.getLogger(f"{__name__}.access")
_no_log.disabled = True


class Port:
    """The listening side of one process. `track_request` must be the application's outermost middleware."""

    def __init__(self, config: HttpConfig, metrics: Metrics, table: Literal["http", "ui"] = "http") -> None:
        """`table` is that of the settings that name the port. The gauge of connections is that of `http`."""
        self._config = config
        self._metrics = metrics
        self._table = table
        self._now = asyncio.get_running_loop().time
        self.connections: Connections[AnyConnection] = Connections(
            limit=config.connections, idle_s=config.idle_s, header_s=config.header_s
        )
        self._server: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        """Only with TLS."""
        self._connect: Callable[[Handshake | None], _HttpConnection]
        self._tls = bool(config.tls_cert)
        self._context: ssl.SSLContext
        self._tasks: asyncio.TaskGroup
        """The tasks of TLS handshakes."""
        self._sweeping: asyncio.TimerHandle
        self._swept_s = self._now()
        self._skipped_sweep = False
        """Whether the last sweep closed nothing because it came late."""
        self._ending = False
        self._empty = asyncio.Event()
        """Set when the last connection closes."""

    # --- what aiohttp and the connections report

    @web.middleware
    async def track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record which connections have a request."""
        connection = request.protocol
        self.connections.request_began(connection)
        try:
            return await handler(request)
        finally:
            self.connections.request_ended(connection, self._now())
            if self._ending:
                connection.close()  # a stream that began earlier could not announce it in its headers

    async def add_connection_header(self, request: web.Request, response: web.StreamResponse) -> None:
        """Announce in the last answer of a connection that it closes; an aiohttp `on_response_prepare` signal."""
        if self._ending or cast(_HttpConnection, request.protocol).may_leak_trailer(request):
            response.force_close()
            response.headers["Connection"] = "close"

    def admit_connection(self, connection: AnyConnection) -> bool:
        """Add a new connection and return True. False if it must be closed. At the limit an idle one is closed for
        it."""
        now = self._now()
        if (evicted := self.connections.to_evict(now)) is not None:
            self._close(evicted, "room")
        if self.connections.full:
            self._metrics.closed_connections.labels("full").inc()
            return False
        self.connections.add(connection, now)
        self._show_count()
        return True

    def _show_count(self) -> None:
        if self._table == "http":
            self._metrics.connections.set(len(self.connections))

    def bytes_received(self, connection: AnyConnection) -> None:
        """Record that bytes came on a connection."""
        self.connections.bytes_received(connection, self._now())

    def connection_closed(self, connection: AnyConnection) -> None:
        """Forget a connection that is closed."""
        self.connections.remove(connection)
        self._show_count()
        if not len(self.connections):
            self._empty.set()

    # --- start and shutdown

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """With TLS, read the certificate and reload it whenever its files change. Raise ConfigError."""
        if self._tls:
            self._tasks = tasks
            await certificate(self._config, self._metrics, self._use_context).start(tasks, "reload the certificate")

    def _use_context(self, context: ssl.SSLContext) -> None:
        self._context = context

    @asynccontextmanager
    async def open(self, app: web.Application) -> AsyncIterator[str]:
        """Listen while the context is open; yield the base URL. Raise ConfigError if the port cannot be opened."""
        config, loop = self._config, asyncio.get_running_loop()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        self._connect = partial(_HttpConnection, self, runner.server, loop)
        self._sweep()
        try:
            try:
                self._server = await loop.create_server(
                    *(partial(self._connect, None), config.host, config.port),
                    reuse_port=config.reuse_port,
                    backlog=BACKLOG,
                    start_serving=not self._tls,
                )
                for listener in self._server.sockets:  # accepted connections inherit it
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
                if self._tls:
                    self._acceptor = Acceptor(self._server, BACKLOG, self._begin_handshake)
            except OSError as wrong:
                raise ConfigError(
                    f"{self._table}: cannot listen on {config.host}:{config.port}: {wrong.strerror}"
                ) from None
            host, port = advertised(config.host), self._server.sockets[0].getsockname()[1]
            scheme = "https" if self._tls else "http"
            url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
            _log.info("listening on %s" if self._table == "http" else "the page is at %s/ui", url)
            yield url
        finally:
            self._sweeping.cancel()
            await self._stop_accepting()
            await runner.cleanup()

    def _begin_handshake(self, accepted: socket.socket) -> None:
        handshake = Handshake()
        if self.admit_connection(handshake):
            running = self._shake_hands(handshake, accepted, self._context)
            handshake.task = self._tasks.create_task(running, name="TLS handshake")
        else:
            accepted.close()

    async def _shake_hands(self, handshake: Handshake, accepted: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._connect, handshake),
                accepted,
                ssl=context,
                ssl_handshake_timeout=self._config.header_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # SSLError, timeout and connection reset are subclasses
            self._metrics.closed_connections.labels("handshake").inc()
        finally:
            self.connection_closed(handshake)

    async def announce_closing(self) -> None:
        """Serve for `drain_delay_s` more; each answer announces that its connection closes."""
        self._ending = True
        await asyncio.sleep(self._config.drain_delay_s)

    async def drain(self) -> None:
        """Accept no more connections. Give open ones DRAIN_S for a last request, then close those that are idle."""
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
                with suppress(OSError):  # BlockingIOError: no connection waits any longer
                    while True:
                        accepted.append(listener.accept()[0])
                listener.shutdown(socket.SHUT_RD)  # uvloop may close its own socket only a turn later
        server.close()
        for connection in accepted:
            if self._tls:
                connection.setblocking(False)
                self._begin_handshake(connection)
            else:
                await asyncio.get_running_loop().connect_accepted_socket(partial(self._connect, None), connection)
        await asyncio.sleep(0)  # connections that uvloop has just accepted appear in the loop's next turn

    def _sweep(self) -> None:
        """Close connections that have waited too long. If this process was stopped for a while, its timers fire before
        it reads what clients sent in the meantime; so a late sweep is skipped once."""
        since_s, self._swept_s = self._swept_s, self._now()
        self._skipped_sweep = not self._skipped_sweep and self._swept_s - since_s > 2 * SWEEP_S
        if not self._skipped_sweep:
            for connection, why in list(self.connections.pop_overdue(self._swept_s)):
                self._close(connection, why)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _close(self, connection: AnyConnection, why: CloseReason) -> None:
        self.connections.remove(connection)
        self._metrics.closed_connections.labels(why).inc()
        transport = connection.transport
        if why == "header" and transport is not None:
            transport.write(_HEADER_TIMEOUT)
        connection.force_close()
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()  # the client does not read, and closing would wait for it without a limit


class _HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, which reports to the port what happens. The port limits its idle time."""

    __slots__ = ("_handshake", "_last_bytes", "_port")

    def __init__(
        self, port: Port, server: web.Server, loop: asyncio.AbstractEventLoop, handshake: Handshake | None
    ) -> None:
        """`handshake` was counted in place of this connection until it is made; None without TLS."""
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=_NEVER_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # it would run in the event loop, even for requests that are refused
            access_log=_no_log,
            logger=_aiohttp_log,
        )
        self._port = port
        self._handshake = handshake
        self._last_bytes = b""
        """The last bytes received, as many as LAST_CHUNK has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._handshake is not None:
            self._port.connections.remove(self._handshake)  # this connection takes its place
        if self._port.admit_connection(self):
            super().connection_made(transport)
        else:
            cast(asyncio.Transport, transport).write(_FULL)  # uvloop's transport is not a subclass
            transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer with OpenAI's error object what aiohttp could not parse or handle, and log as aiohttp does."""
        plain = super().handle_error(request, status, exc, message)
        reason = plain.text if isinstance(plain, web.Response) and status < 500 else None
        reason = reason and re.split("[:\n]", reason, maxsplit=1)[0]  # the rest repeats what was sent, perhaps a key
        reason = reason and re.sub(
            "^(Got more than .* bytes) when reading$", r"\1 in one header or in the path", reason
        )
        kind = "invalid_request_error" if status < 500 else "server_error"
        wrong = failure(status, reason or "internal server error", kind)
        response = _NoServerHeader(status=status, body=wrong.payload, content_type="application/json")
        response.force_close()
        return response

    def data_received(self, data: bytes) -> None:
        if data:  # aiohttp itself calls this with empty data
            self._port.bytes_received(self)
            self._last_bytes = (self._last_bytes + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        super().data_received(data)

    def may_leak_trailer(self, request: web.Request) -> bool:
        """Return whether a trailer of this request may become a header of the next one. Then the connection must close.

        aiohttp's parser (3.14.5) takes the last trailer of a chunked body for the first header of the next request. A
        request surely has no trailer if it is complete, LAST_CHUNK came last and no other request has come: `0` is no
        trailer, since a trailer has a colon.
        """
        if "Transfer-Encoding" not in request.headers:
            return False
        complete = request.content.is_eof() and self._last_bytes == LAST_CHUNK
        return not complete or bool(self._messages) or self._upgraded

    def connection_lost(self, exc: BaseException | None) -> None:
        self._port.connection_closed(self)
        super().connection_lost(exc)


AnyConnection = web.RequestHandler | Handshake


class _NoServerHeader(web.Response):
    """A response without a Server header, for answers that pass no application and so no middleware."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop("Server", None)


def _response(reason: str, wrong: Failure) -> bytes:
    """Return the bytes of a whole HTTP response that closes its connection."""
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(wrong.payload)),
        "Connection": "close",
        **wrong.headers,
    }
    lines = [f"HTTP/1.1 {wrong.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + wrong.payload


_HEADER_TIMEOUT = _response(
    "Request Timeout",
    failure(408, "the headers of the request did not arrive in time", "invalid_request_error", code="request_timeout"),
)
_FULL = _response("Service Unavailable", failure_of(Unavailable("this frontend has reached its limit of connections")))
