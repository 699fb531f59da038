"""The Unix socket in the pool's directory, through which engines reach kvbm.

    engine ── Asked ──▶ connection ──▶ handle(request) ──▶ the service, as for a request over NATS
           ◀── Hello, Answered ──  the request's `answer` writes to its connection

A connection's requests are handled one at a time, in order. Those that kvbm has read when the client closes are handled
too, perhaps after the first ones of its next connection, so each request carries its connection's number. Every bound
closes the connection that reaches it: its engine connects and attaches again. An engine's tickets do not depend on its
connection, but on its lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count

from services.kvbm.doors.replies import Request
from services.kvbm.metrics import StoreMetrics
from services.kvbm.pool.owners import MOST_OWNERS
from shared.errors import PayloadTooLarge, ProtocolError
from shared.pool.lock import SOCKET, HeldLock
from shared.pool.socket_frames import TO_KVBM, Answered, FrameReader, Hello, encode_frame
from shared.rate_limited_log import RateLimitedLog
from shared.socket_path import reachable
from shared.tracing.traceparent import HEADER

MOST_CONNECTIONS = MOST_OWNERS
"""The most connections at once: one an engine. One more is closed."""
MOST_UNSENT_BYTES = 1 << 22
"""The most bytes of answers that a client has not read. With more, its connection is closed."""
ACCEPT_RETRY_S = 0.5
"""Seconds after which connections are accepted again, when there were no file descriptors for one."""
CLOSE_S = 1.0
"""Seconds that a client has to read its last answers when kvbm stops."""
_READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class SocketDoor:
    """Listens at `DIR/socket`, while this process holds the lock of the directory: no other kvbm has a socket there."""

    def __init__(
        self,
        lock: HeldLock,
        metrics: StoreMetrics,
        handle: Callable[[Request], Awaitable[None]],
        hello: Callable[[], Hello],
    ) -> None:
        self.path = lock.path.parent / SOCKET
        self.refused = RateLimitedLog()
        """Connections that were closed at a bound, or for what they sent."""
        self._lock = lock
        self._metrics = metrics
        self._handle = handle
        self._hello = hello
        self.reason = "the socket is not open yet"
        """Why no engine can connect. Empty if they can."""
        self._listening: socket.socket | None = None
        self._bound: os.stat_result | None = None
        """What the path was when `_listening` was bound to it."""
        self._welcomes: set[asyncio.Task[None]] = set()
        """Connections that were accepted, and are not in `_connections` yet."""
        self._stopping = False
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._numbers = count(1)
        """The numbers of connections, in the order in which clients made them. 0 is NATS."""

    def listen(self) -> None:
        """Listen, unless the path is the socket that listens already; connections stay. If that is not possible,
        `reason` and the log say why: only engines of one's own reach this kvbm then."""
        if self._stopping or (self._listening is not None and self._is_at_path()):
            return
        if self._listening is not None:
            _log.warning("the socket at %s was removed or replaced, so it is made again", self.path)
            self._end_listening(self._listening)
        try:
            self._listening = self._bind()
            self._watch(self._listening)
            self.reason = ""
        except (OSError, NotImplementedError) as wrong:  # an event loop need not have sockets
            if self._listening is not None:
                self._listening.close()
                self._listening = None
            was = self.reason
            self.reason = f"no socket at {self.path}, so that workers exchange no blocks with this kvbm: {wrong}"
            if self.reason != was:
                _log.error("%s", self.reason)

    async def stop_reading(self) -> None:
        """Accept no connection and no request any longer. Answers can still be sent."""
        self._stopping = True
        if self._listening is not None:
            if self._is_at_path():
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)
            self._end_listening(self._listening)
        if self._welcomes:
            await asyncio.wait(self._welcomes)
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Close all connections, after `stop_reading`. What a client does not read in time is dropped."""
        writers = list(self._connections)
        for writer in writers:
            writer.close()
        waits = [asyncio.create_task(_closed(writer)) for writer in writers]
        if waits:
            _, late = await asyncio.wait(waits, timeout=CLOSE_S)
            for writer in writers:
                writer.transport.abort()
            if late:
                await asyncio.wait(late)
        self._connections.clear()

    def _bind(self) -> socket.socket:
        """Return a socket that listens at the path. Raise OSError."""
        # Not asyncio's server: one that is closed forgets the connections that it has just accepted.
        if not self._lock.held:
            raise FileNotFoundError(f"{self._lock.path} was removed or replaced, so another kvbm may be there")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)  # of a kvbm that was killed
            with ExitStack() as opened:
                listening.bind(reachable(str(self.path), opened))
            self.path.chmod(0o600)  # before it listens
            self._bound = self.path.stat()
            listening.listen(MOST_CONNECTIONS)
        except OSError:
            listening.close()
            raise
        return listening

    def _is_at_path(self) -> bool:
        """Whether engines that connect to the path reach the socket that listens."""
        try:
            return self._bound is not None and os.path.samestat(self.path.stat(), self._bound)
        except OSError:
            return False

    def _end_listening(self, listening: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(listening)
        listening.close()
        self._listening = None

    def _watch(self, listening: socket.socket) -> None:
        if listening is self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Take one connection that waits; if more do, the loop calls again."""
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as wrong:  # out of file descriptors: the socket stays readable, so wait before the next try
            self.refused.warn("socket", f"a connection could not be accepted: {wrong.strerror}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_RETRY_S, self._watch, listening)
            return
        accepted.setblocking(False)
        if len(self._connections) + len(self._welcomes) >= MOST_CONNECTIONS:
            self.refused.warn("socket", f"a connection was closed, as there are {MOST_CONNECTIONS} already")
            accepted.close()
            return
        welcome = asyncio.create_task(self._welcome(accepted, next(self._numbers)))
        self._welcomes.add(welcome)
        welcome.add_done_callback(self._welcomes.discard)

    async def _welcome(self, accepted: socket.socket, number: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=accepted)
        except OSError:  # the client is gone
            accepted.close()
            return
        self.serve(reader, writer, number)

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        """Say hello on the connection of this number, and handle its requests until it ends."""
        writer.write(encode_frame(self._hello()))
        self._connections[writer] = asyncio.create_task(self._serve(reader, writer, number))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        """Handle a connection's requests until it ends. When kvbm stops, leave it open for the last answers."""
        frames = FrameReader()
        try:
            while data := await reader.read(_READ_BYTES):
                for body in frames.feed(data):
                    asked = TO_KVBM.decode(body)
                    answer = partial(self._answer, writer, asked.number)
                    headers = {HEADER: asked.trace} if asked.trace else {}
                    try:
                        await self._handle(Request(asked.operation, asked.payload, headers, answer, number))
                    except Exception:  # noqa: BLE001 - a fault of ours: as over NATS, it is seen
                        _log.exception("socket: %s failed, so its connection is closed", asked.operation[:64])
                        self._metrics.unanswered.inc()
                        return
                    await asyncio.sleep(0)  # other connections have their turn
        except ProtocolError as wrong:
            self.refused.warn("socket", f"a connection was closed, as it sent nonsense: {wrong}")
        except OSError:
            pass  # the client is gone, which its lock tells
        finally:
            if not self._stopping:
                del self._connections[writer]
                writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, number: int, payload: bytes, last: bool) -> bool:
        """Send an answer. Return whether it was sent."""
        try:
            frame = encode_frame(Answered(number, payload, last))
        except PayloadTooLarge as wrong:
            _log.error("socket: no answer: %s", wrong)
            self._metrics.unanswered.inc()
            return False
        if writer.is_closing():
            self._metrics.unanswered.inc()
            return False
        writer.write(frame)
        unsent_bytes = writer.transport.get_write_buffer_size()
        if unsent_bytes > MOST_UNSENT_BYTES:
            self.refused.warn("socket", f"a connection was closed, as it left {unsent_bytes} bytes of answers unread")
            writer.transport.abort()
            self._metrics.unanswered.inc()
            return False
        return True


async def _closed(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await writer.wait_closed()
