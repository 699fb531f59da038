"""TLS on the HTTP port: handshakes, the certificate, and a connection's way from TCP to HTTP.

    accepted ──▶ counted like any connection ──▶ handshake ──▶ the protocol of a plain connection, over TLS
                     │ timeout, no TLS, disconnect
                     ▼
                   closed

Each new connection uses the context of that moment, so a new certificate applies to new connections only. The event
loops' own servers report a connection only after its handshake, so they could not limit handshakes. (Nor does
`start_tls` work: uvloop goes on reading while it is paused if that is requested in `connection_made`.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from services.frontend.auth.file_reload import FileReloader
from services.frontend.config import HttpConfig
from services.frontend.metrics import Metrics
from shared.errors import ConfigError

FILE_LIMIT_BYTES = 1 << 20
"""Bytes that a certificate or key file may have."""
SHUTDOWN_S = 2.0
"""Seconds that a client may take to acknowledge the end of its TLS session."""
ACCEPTS_PER_TURN = 64
"""Connections accepted in one turn of the event loop, so that many at once do not stop the streams of others."""
ACCEPT_RETRY_S = 1.0
"""Seconds until connections are accepted again after the process ran out of file descriptors."""

_log = logging.getLogger(__name__)


def certificate(
    config: HttpConfig, metrics: Metrics, use: Callable[[ssl.SSLContext], None]
) -> FileReloader[ssl.SSLContext]:
    """Return what reads the certificate and key of the port. `use` gets the TLS context, again whenever the files
    change."""
    cert, key = Path(config.tls_cert), Path(config.tls_key)
    what = f"http.tls_cert {cert}, http.tls_key {key}"
    # OpenSSL reads the files itself; a change in between is noticed at the next poll.
    return FileReloader(
        what, [cert, key], FILE_LIMIT_BYTES, lambda _: tls_context(cert, key), use, metrics.stale_files.labels("tls")
    )


def tls_context(cert: Path, key: Path, authorities: Path | None = None) -> ssl.SSLContext:
    """Make the TLS context. With `authorities` clients must show a certificate that one of them has signed. Raise
    ConfigError if the files cannot be read, or certificate and key do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # keeps OpenSSL from asking for one on the terminal
    except ssl.SSLError as wrong:
        raise ConfigError(f"not a certificate and its key: {wrong.reason or 'no PEM data'}") from None
    except OSError as wrong:
        raise ConfigError(str(wrong.strerror)) from None
    except ValueError as wrong:
        raise ConfigError(f"not a certificate and its key: {wrong}") from None
    if authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError:
            raise ConfigError("no certificates of authorities in PEM") from None
        except OSError as wrong:
            raise ConfigError(str(wrong.strerror)) from None
    return context


class Handshake:
    """One connection until its TLS handshake is done."""

    transport = None
    """None, since nothing can be written before the handshake."""
    task: asyncio.Task[None] | None = None
    """Does the handshake."""

    def force_close(self) -> None:
        """Abandon the handshake and close the connection."""
        if self.task is not None:
            self.task.cancel()


class Acceptor:
    """Accepts the connections of a server in its place."""

    def __init__(self, server: asyncio.Server, backlog: int, accepted: Callable[[socket.socket], None]) -> None:
        """`server` is bound and does not serve; `accepted` is called with each new connection."""
        self._accepted = accepted
        self._listeners = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(backlog)
            self._watch(listener)

    def close(self) -> None:
        """Accept no more connections; the server's own sockets still listen."""
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
            except OSError as wrong:  # out of file descriptors: the socket stays readable, so wait before the next try
                _log.error("cannot accept a connection: %s", wrong.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_RETRY_S, self._watch, listener)
                return
            accepted.setblocking(False)
            self._accepted(accepted)
