"""`headrace check --serve`: answers the probes of another machine's `headrace check --peer`.

    accept ── room? ──▶ thread: first message ─┬─ ProbeHello ──▶ the measurement, if there is none
         └─ none: closed                       └─ ProbeJoin ───▶ a further stream of it

Everything is bounded: connections, bytes and time of a measurement, the time of each message and each piece.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import assert_never

import msgspec
from msgspec import Struct

from deploy.local.check import frames
from deploy.local.check.wire import Address, Wire
from shared.errors import ConfigError, ProtocolError
from shared.installation import COMMAND
from shared.version import VERSION

MOST_CONNECTIONS = 2 * frames.MOST_STREAMS
FIRST_MESSAGE_S = 3.0
"""How long a connection may take until its first message is there, in seconds."""

ACCEPT_AGAIN_S = 0.1
"""The pause after a connection that could not be accepted, in seconds."""
EVERYWHERE, LOOPBACK = ("0.0.0.0", "::"), ("127.0.0.1", "::1")  # noqa: S104 compared with, not bound


class ProbeSession(Struct):
    """The measurement that is under way."""

    name: str
    until_s: float
    left_bytes: int = frames.SESSION_LIMIT_BYTES
    streams: set[socket.socket] = msgspec.field(default_factory=set)


class ProbeServer:
    """A listening socket and a thread for each connection. `close` ends all of them."""

    def __init__(self, address: Address) -> None:
        """Listen. Raise ConfigError."""
        try:
            kind = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._listening = socket.create_server(address, family=kind, backlog=MOST_CONNECTIONS)
        except (OSError, UnicodeError) as wrong:
            said = getattr(wrong, "strerror", None) or wrong
            raise ConfigError(f"--serve {address[0]}:{address[1]}: {said}") from None
        self.address: Address = self._listening.getsockname()[:2]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards all fields below."""
        self._session: ProbeSession | None = None
        self._open = set[socket.socket]()

    def run(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                continue
            with self._lock:
                room = len(self._open) < MOST_CONNECTIONS
                if room:
                    self._open.add(connection)
            if room:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def close(self) -> None:
        """End all connections, and `run`."""
        self._closed.set()
        with suppress(OSError):  # wakes `accept`
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            _end(self._open)

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError, ProtocolError):
            self._first(connection)
        with self._lock:
            self._open.discard(connection)

    def _first(self, connection: socket.socket) -> None:
        first = Wire(connection, time.monotonic() + FIRST_MESSAGE_S)
        asked = frames.question(first.receive())
        if not isinstance(asked, frames.ProbeHello | frames.ProbeJoin):
            raise ProtocolError("no greeting")
        admitted = self._admit(asked, connection)
        if isinstance(admitted, str):
            first.send(frames.ProbeBusy(admitted))
            return
        try:
            wire = Wire(connection, admitted.until_s)
            nixl = importlib.util.find_spec("nixl") is not None
            wire.send(frames.ProbeWelcome(frames.VERSION, VERSION, admitted.name, nixl))
            with suppress(EOFError):
                while True:
                    self._answer(wire, admitted)
        finally:
            with self._lock:
                admitted.streams.discard(connection)
                if isinstance(asked, frames.ProbeHello):
                    self._session = None
                    _end(admitted.streams)

    def _admit(self, asked: frames.ProbeHello | frames.ProbeJoin, connection: socket.socket) -> ProbeSession | str:
        """Return the measurement that a connection takes part in, or why it may not."""
        with self._lock:
            session = self._session
            if asked.version != frames.VERSION:
                return f"version {frames.VERSION} of the protocol, not {asked.version}: use one version of Headrace"
            if isinstance(asked, frames.ProbeHello):
                if session is not None:
                    left_s = max(1.0, session.until_s - time.monotonic())
                    return f"another check measures this machine now; try again in {left_s:.0f} s at most"
                session = self._session = ProbeSession(secrets.token_hex(16), time.monotonic() + frames.SESSION_S)
            elif session is None or not secrets.compare_digest(asked.session.encode(), session.name.encode()):
                return "no such measurement"
            elif len(session.streams) >= frames.MOST_STREAMS:
                return f"a measurement has at most {frames.MOST_STREAMS} streams"
            session.streams.add(connection)
            return session

    def _answer(self, wire: Wire, session: ProbeSession) -> None:
        asked = frames.question(wire.receive())
        match asked:
            case frames.ProbeHello() | frames.ProbeJoin():
                raise ProtocolError("a second greeting")
            case frames.ProbeEcho(number=number):
                wire.send(frames.ProbeEchoed(number, time.time()))
            case frames.ProbeUpload(size_bytes=size_bytes):
                self._take(session, size_bytes)
                wire.receive_bytes(size_bytes)
                wire.send(frames.ProbeUploaded(size_bytes))
            case frames.ProbeDownload(size_bytes=size_bytes):
                self._take(session, size_bytes)
                wire.send_bytes(size_bytes)
            case _:
                assert_never(asked)

    def _take(self, session: ProbeSession, size_bytes: int) -> None:
        """Count bytes of the measurement. Raise ProtocolError beyond its limit."""
        with self._lock:
            session.left_bytes -= size_bytes
            if session.left_bytes < 0:
                raise ProtocolError("more bytes than a measurement may have")


def _end(connections: Iterable[socket.socket]) -> None:
    """Wake the threads of these connections: their next call fails."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def serve(address: Address) -> int:
    """Answer probes until Ctrl-C; return the exit status. Raise ConfigError."""
    server = ProbeServer(address)
    host, port = server.address
    reached = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    print(
        f"port {port} answers until Ctrl-C; on the other machine: {COMMAND} check --peer {reached}:{port}", flush=True
    )
    if host in LOOPBACK:
        print("no other machine reaches loopback: use --serve 0.0.0.0:PORT while you measure", file=sys.stderr)
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0
