"""A port that publishes one topic to ZMQ's SUB sockets, in the event loop; zmtp.py has the protocol.

    published ──▶ [ waiting, limited, shared by all ] ──▶ each subscriber, from its own position
                    └ over the limit: the oldest are dropped, and a subscriber that has not received them sees a gap

The limits: at most SEND_LIMIT_BATCHES and SEND_LIMIT_BYTES wait, however many subscribers do not read. Each subscriber
may hold one batch more, which it has received in part. A connection over SUBSCRIBERS_LIMIT is closed at once, and one
whose handshake takes longer than HANDSHAKE_LIMIT_S is closed then. zmtp.py limits what a subscriber may send.

docs/decisions/0039 gives the reasons.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from pathlib import Path

from shared.bus import zmtp
from shared.errors import ProtocolError
from shared.rate_limited_log import RateLimitedLog

SEND_LIMIT_BATCHES = 20_000
SEND_LIMIT_BYTES = 64 << 20
"""The maximum size of the waiting batches; a single larger batch waits too."""
SUBSCRIBERS_LIMIT = 1024
HANDSHAKE_LIMIT_S = 10.0
READ_BYTES = 2 << 10
"""The number of bytes read from one connection before the event loop gets a turn: 1 ms for the smallest frames."""
BUFFERS_A_WRITE = 64
ANSWERS_LIMIT = 64
"""The maximum number of answers that wait for one subscriber; further pings get no answer."""
ACCEPT_AGAIN_S = 0.5
"""The pause in seconds after an `accept` has failed, most often because too many files are open."""
_CLOSED = "a connection to the KV events is closed"


class EventPort:
    """Listens from construction, in a running event loop, at a port of `host` or at the Unix socket `path`.

    Raise OSError if the address is not this machine's, or the socket cannot be made.
    """

    def __init__(self, host: str, topic: bytes, subscribers_limit: int = SUBSCRIBERS_LIMIT, *, path: str = "") -> None:
        self.topic = topic
        self._subscribers_limit = subscribers_limit
        self._path = path
        self._listener = socket.create_server(path, family=socket.AF_UNIX) if path else _listener(host)
        self._listener.setblocking(False)
        self.port: int = 0 if path else self._listener.getsockname()[1]
        self.loop = asyncio.get_running_loop()
        self.waiting = _Waiting()
        self._connections: dict[_Connection, None] = {}
        self.limited_log = RateLimitedLog()
        self._accept_again: asyncio.TimerHandle | None = None
        self.loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def publish(self, *frames: bytes) -> None:
        """Publish one message to each subscriber. The oldest waiting messages are dropped if too much waits."""
        self.waiting.append(zmtp.message(frames))
        for connection in list(self._connections):
            connection.published()
        self._trim()

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        if self._accept_again is not None:
            self._accept_again.cancel()
        self.loop.remove_reader(self._listener.fileno())
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
            self.limited_log.warn(_CLOSED, wrong)
            self.loop.remove_reader(self._listener.fileno())
            again = self.loop.add_reader
            self._accept_again = self.loop.call_later(ACCEPT_AGAIN_S, again, self._listener.fileno(), self._accept)
            return
        if len(self._connections) >= self._subscribers_limit:
            self.limited_log.warn(_CLOSED, f"{self._subscribers_limit} others are connected")
            accepted.close()
            return
        connection = _Connection(accepted, self)
        self._connections[connection] = None
        connection.greet()

    def connection_moved(self, connection: _Connection) -> None:
        """Drop what no connection needs any longer: this one has caught up, or is closed."""
        if connection.closed:
            self._connections.pop(connection, None)
        self._trim()

    def _trim(self) -> None:
        nexts = [connection.next for connection in self._connections if connection.next is not None]
        self.waiting.trim(min(nexts, default=self.waiting.end))


def _listener(host: str) -> socket.socket:
    ipv6 = ":" in host
    return socket.create_server(
        (host, 0),
        family=socket.AF_INET6 if ipv6 else socket.AF_INET,
        dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
    )


class _Waiting:
    """The messages that some subscriber has not received, numbered in their order."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self.size_bytes = 0
        self.begin = 0
        """The number of the oldest message."""

    @property
    def end(self) -> int:
        """The number of the next message."""
        return self.begin + len(self._messages)

    def __getitem__(self, number: int) -> bytes:
        return self._messages[number - self.begin]

    def append(self, data: bytes) -> None:
        self._messages.append(data)
        self.size_bytes += len(data)
        while len(self._messages) > SEND_LIMIT_BATCHES or (
            len(self._messages) > 1 and self.size_bytes > SEND_LIMIT_BYTES
        ):
            self._drop()

    def trim(self, begin: int) -> None:
        """Drop the messages before `begin`, which all subscribers have received."""
        while self.begin < begin:
            self._drop()

    def _drop(self) -> None:
        self.size_bytes -= len(self._messages.popleft())
        self.begin += 1


class _Connection:
    """The connection of one subscriber; `_said` is what it has sent.

    It is sent the rest of a message that it has received in part, then answers to it, then the messages for all.
    """

    def __init__(self, accepted: socket.socket, port: EventPort) -> None:
        self._socket = accepted
        self._port = port
        self._said = zmtp.Subscriber(port.topic)
        self._waiting = port.waiting
        self._loop = port.loop
        self._rest = memoryview(b"")
        self._answers: deque[bytes] = deque()
        self.next: int | None = None
        """The number of the message that it is sent next. None if it has not subscribed."""
        self._blocked = False
        """Whether the socket is full; the event loop reports when it has room."""
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._late = self._loop.call_later(HANDSHAKE_LIMIT_S, self._give_up)
        self._loop.add_reader(accepted.fileno(), self._read)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def greet(self) -> None:
        self._answer(zmtp.GREETING)

    def published(self) -> None:
        """Send a message that was just published."""
        if self.next is not None and not self._blocked:
            self._write()

    def close(self) -> None:
        if self.closed:
            return
        self._late.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._rest = memoryview(b"")
        self._answers.clear()
        self.next = None
        self._port.connection_moved(self)

    def _give_up(self) -> None:
        if not self._said.ready:
            self._port.limited_log.warn(_CLOSED, f"no handshake in {HANDSHAKE_LIMIT_S:g} s")
            self.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                self.close()
                return
            answers = self._said.receive(data)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        except ProtocolError as wrong:
            self._port.limited_log.warn(_CLOSED, wrong)
            self.close()
            return
        if not self._said.subscribed:
            self.next = None
        elif self.next is None:
            self.next = self._waiting.end
        for answer in answers:
            self._answer(answer)

    def _answer(self, data: bytes) -> None:
        if self.closed or len(self._answers) >= ANSWERS_LIMIT:
            return
        self._answers.append(data)
        if not self._blocked:
            self._write()

    def _write(self) -> None:
        """Send as much as the socket accepts in one call; the rest follows when it has room."""
        if self.closed:
            return
        at = end = self._waiting.end
        if self.next is not None:
            at = max(self.next, self._waiting.begin)
        rest = 1 if self._rest else 0
        messages = [self._waiting[number] for number in range(at, min(end, at + BUFFERS_A_WRITE))]
        buffers = [*((self._rest,) if rest else ()), *self._answers, *messages]
        try:
            sent = self._socket.sendmsg(buffers)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        begun = 0
        for data in buffers:
            if not sent:
                break
            begun += 1
            self._rest = memoryview(data)[sent:] if sent < len(data) else memoryview(b"")
            sent = max(0, sent - len(data))
        answered = min(max(0, begun - rest), len(self._answers))
        for _ in range(answered):
            self._answers.popleft()
        if self.next is not None:
            self.next = at + max(0, begun - rest - answered)
        self._block(bool(self._rest or self._answers) or (self.next is not None and self.next < end))

    def _block(self, blocked: bool) -> None:
        if blocked and not self._blocked:
            self._loop.add_writer(self._socket.fileno(), self._write)
        elif self._blocked and not blocked:
            self._loop.remove_writer(self._socket.fileno())
        was, self._blocked = self._blocked, blocked
        if was and not blocked:
            self._port.connection_moved(self)
