"""A port that publishes one topic to ZMQ's SUB sockets, in the event loop; zmtp.py says what is spoken there.

Bounds: a subscriber that SEND_LIMIT_BATCHES or SEND_LIMIT_BYTES wait for loses what comes meanwhile, and sees the gap.
A connection over SUBSCRIBERS_LIMIT is closed at once, and one that takes longer than HANDSHAKE_LIMIT_S for its
handshake is closed then. zmtp.py bounds what a subscriber may say.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from shared import zmtp
from shared.complaint import Complaint
from shared.errors import ProtocolError

SEND_LIMIT_BATCHES = 20_000
SEND_LIMIT_BYTES = 64 << 20
"""Or one batch."""
SUBSCRIBERS_LIMIT = 1024
HANDSHAKE_LIMIT_S = 10.0
READ_BYTES = 16 << 10
"""Taken from one connection before the event loop gets a turn."""
BUFFERS_A_WRITE = 64
ACCEPT_AGAIN_S = 0.5
"""After the machine refused one, most often since this process has too many files open."""


class EventPort:
    """Listens from construction, in a running event loop: at a port of `host`, or at the socket `path`. Raises OSError
    where that is not this machine's, or cannot be made."""

    def __init__(self, host: str, topic: bytes, subscribers_limit: int = SUBSCRIBERS_LIMIT, *, path: str = "") -> None:
        self._topic = topic
        self._subscribers_limit = subscribers_limit
        self._path = path
        self._listener = _unix_listener(path) if path else _listener(host)
        self._listener.setblocking(False)
        self.port: int = 0 if path else self._listener.getsockname()[1]
        self._loop = asyncio.get_running_loop()
        self._connections: dict[_Connection, None] = {}
        self._complaint = Complaint("a connection to the KV events is closed")
        self._accept_again: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def publish(self, *frames: bytes) -> None:
        """One message to each subscriber; lost where too much waits already."""
        data = zmtp.message(frames)
        for connection in list(self._connections):
            connection.publish(data)

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        if self._accept_again is not None:
            self._accept_again.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as wrong:
            self._complaint.add(wrong)
            self._loop.remove_reader(self._listener.fileno())
            again = self._loop.add_reader
            self._accept_again = self._loop.call_later(ACCEPT_AGAIN_S, again, self._listener.fileno(), self._accept)
            return
        if len(self._connections) >= self._subscribers_limit:
            self._complaint.add(f"{self._subscribers_limit} others are connected")
            accepted.close()
            return
        connection = _Connection(accepted, self._topic, self._closed, self._complaint, self._loop)
        self._connections[connection] = None
        connection.greet()

    def _closed(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)


def _listener(host: str) -> socket.socket:
    ipv6 = ":" in host
    return socket.create_server(
        (host, 0),
        family=socket.AF_INET6 if ipv6 else socket.AF_INET,
        dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
    )


def _unix_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class _Connection:
    """One subscriber's: what it said is in `_said`, what it has not taken yet in `_unsent`."""

    def __init__(
        self,
        accepted: socket.socket,
        topic: bytes,
        closed: Callable[[_Connection], None],
        complaint: Complaint,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._socket = accepted
        self._said = zmtp.Subscriber(topic)
        self._closed = closed
        self._complaint = complaint
        self._loop = loop
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._late = loop.call_later(HANDSHAKE_LIMIT_S, self._give_up)
        loop.add_reader(accepted.fileno(), self._read)

    def greet(self) -> None:
        self._offer(zmtp.GREETING)

    def publish(self, data: bytes) -> None:
        if self._said.subscribed:
            self._offer(data)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._late.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._unsent.clear()
        self._closed(self)

    def _give_up(self) -> None:
        if not self._said.ready:
            self._complaint.add(f"no handshake in {HANDSHAKE_LIMIT_S:g} s")
            self.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                self.close()
                return
            for answer in self._said.take(data):
                self._offer(answer)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        except ProtocolError as wrong:
            self._complaint.add(wrong)
            self.close()

    def _offer(self, data: bytes) -> None:
        """Send it after what waits already, or lose it at the bound."""
        waits = len(self._unsent)
        if waits >= SEND_LIMIT_BATCHES or (waits and self._unsent_bytes + len(data) > SEND_LIMIT_BYTES):
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        if not waits:
            self._write()

    def _write(self) -> None:
        """As much as the connection takes in one call; the rest when it takes more."""
        if self._socket.fileno() < 0:
            return
        try:
            sent = self._socket.sendmsg(list(islice(self._unsent, BUFFERS_A_WRITE)))
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._unsent_bytes -= sent
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.popleft())
        if sent:
            self._unsent[0] = self._unsent[0][sent:]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self._loop.remove_writer(self._socket.fileno())
