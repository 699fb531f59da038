"""TLS on the port: its certificate, followed, and a connection's way from TCP to HTTP.

    accepted ──▶ counted as any connection ──▶ shaken hands ──▶ the protocol of a plain connection, over TLS
                     │ limit_s, no TLS, gone
                     ▼
                   closed

The context is asked for when a connection comes, so a new certificate is every new connection's, and no old one's.
The loops' own servers show a connection only when its hands are shaken: nobody could bound those before. (Nor would
`start_tls` do: uvloop reads on while it is paused, if that is asked in `connection_made`.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.frontend.auth.file_reload import FileReloader
from services.frontend.config import HttpConfig
from services.frontend.metrics import Metrics
from shared.errors import ConfigError

FILE_LIMIT_BYTES = 1 << 20
SHUTDOWN_S = 2.0
"""How long a client may take to say that it has heard the end."""
ACCEPTS_PER_TURN = 64
"""Of the event loop: connections that come all at once do not stop the streams of others."""
ACCEPT_RETRY_S = 1.0

_log = logging.getLogger(__name__)


class Certificate:
    """What the port shows of itself."""

    def __init__(self, config: HttpConfig, metrics: Metrics) -> None:
        self.context: ssl.SSLContext
        """Once it is followed."""
        cert, key = Path(config.tls_cert), Path(config.tls_key)
        self._followed = FileReloader(
            f"http.tls_cert {cert}, http.tls_key {key}",
            [cert, key],
            FILE_LIMIT_BYTES,
            lambda _: tls_context(cert, key),  # OpenSSL reads files; one that changed in between is seen the next time
            self._use,
            metrics.stale_files.labels("tls"),
        )

    async def load_and_watch(self, tasks: asyncio.TaskGroup) -> None:
        """Read it, and follow it from now on. Raises ConfigError."""
        await self._followed.load()
        tasks.create_task(self._followed.run(), name="follow the certificate")

    def _use(self, context: ssl.SSLContext) -> None:
        self.context = context


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Raises ConfigError where they cannot be used together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else OpenSSL would ask the terminal for one
    except ssl.SSLError as wrong:
        raise ConfigError(f"not a certificate and its key: {wrong.reason or 'nothing in PEM'}") from None
    except OSError as wrong:
        raise ConfigError(str(wrong.strerror)) from None
    except ValueError as wrong:
        raise ConfigError(f"not a certificate and its key: {wrong}") from None
    return context


class HandshakePort(Protocol):
    """What a handshake needs of the port."""

    def admit_connection(self, connection: Handshake) -> bool: ...

    def connection_closed(self, connection: Handshake) -> None: ...

    def handshake_failed(self) -> None: ...


class Handshake:
    """One connection, until it is shaken hands."""

    transport = None
    """There is nothing that could be written to yet."""

    def __init__(self, accepted: socket.socket) -> None:
        self._accepted = accepted
        self._shaking: asyncio.Task[None] | None = None

    def begin(
        self,
        port: HandshakePort,
        context: ssl.SSLContext,
        plain: Callable[[], asyncio.Protocol],
        limit_s: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`plain` makes the protocol that goes on, and that says so when it does."""
        if port.admit_connection(self):
            self._shaking = tasks.create_task(self._shake(port, context, plain, limit_s), name="TLS handshake")
        else:
            self._accepted.close()

    def force_close(self) -> None:
        """At once: there is nothing to say."""
        if self._shaking is not None:
            self._shaking.cancel()

    async def _shake(
        self, port: HandshakePort, context: ssl.SSLContext, plain: Callable[[], asyncio.Protocol], limit_s: float
    ) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                plain,
                self._accepted,
                ssl=context,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # an SSLError, a time-out and a reset connection are some
            port.handshake_failed()
        finally:
            port.connection_closed(self)


class Acceptor:
    """Accepts what comes to a server's sockets in its place."""

    def __init__(self, server: asyncio.Server, backlog: int, take: Callable[[socket.socket], None]) -> None:
        """`server` is bound and does not serve."""
        self._take = take
        self._listeners = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(backlog)
            self._watch(listener)

    def close(self) -> None:
        """Accept no more; the server's own sockets still listen."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as wrong:  # no file is left: it would be asked again at once
                _log.error("cannot accept: %s", wrong.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_RETRY_S, self._watch, listener)
                return
            accepted.setblocking(False)
            self._take(accepted)
