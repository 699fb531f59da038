"""SocketDoor: kvbm's Unix socket in its pool's directory, for engines that have no NATS.

    DIR/socket   a connection ──Asked──▶ SocketQuestion ──▶ the same handling as NATS's messages ──▶ Answered

Requests of one connection are handled in order. The directory's mode says who may connect. A connection that sends
nonsense, or does not read its answers, is closed; what its engine holds ends with its lock, or when it attaches again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from services.kvbm.pool.owners import MOST_OWNERS
from shared.bus.contract import Message
from shared.errors import ProtocolError
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import PROTOCOL, Answered, Asked, Frame, FrameReader, Hello, encode_frame
from shared.rate_limited_log import RateLimitedLog

MOST_CONNECTIONS = MOST_OWNERS
"""Most connections at once; one more is closed."""
MOST_UNREAD_BYTES = 4 << 20
"""Most bytes of answers that wait for one engine to read them; over it the connection is closed."""
_READ_BYTES = 1 << 16
_MOST_PATH_BYTES = 107
"""Most bytes of a Unix socket's path, on Linux."""

_log = logging.getLogger(__name__)


class SocketQuestion(Message, frozen=True):
    """A request that came over a connection: `reply` is its number."""

    connection: Connection | None = None


class Connection:
    """One engine's connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reader = FrameReader()

    def send(self, frame: Frame) -> bool:
        """Send a frame without waiting. Return whether the connection took it."""
        if self._writer.is_closing():
            return False
        try:
            self._writer.write(encode_frame(frame))
        except ProtocolError as wrong:
            _log.error("an answer is not sent: %s", wrong)
            return False
        unread_bytes = self._writer.transport.get_write_buffer_size()
        if unread_bytes > MOST_UNREAD_BYTES:
            _log.warning("a connection is closed: its engine has not read %d bytes of answers", unread_bytes)
            self._writer.transport.abort()
            return False
        return True

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()

    def questions(self, data: bytes, subject: Callable[[str], str]) -> list[SocketQuestion]:
        """Return the requests that are complete with `data`. Raise ProtocolError."""
        asked: list[SocketQuestion] = []
        for frame in self._reader.feed(data):
            if not isinstance(frame, Asked):
                raise ProtocolError(f"an engine sent {type(frame).__name__}")
            asked.append(SocketQuestion(subject(frame.operation), frame.payload, str(frame.number), connection=self))
        return asked


def answer(question: SocketQuestion, payload: bytes, *, last: bool) -> bool:
    """Send an answer to a request; `last` matters for a fetch alone, which may have several. Return whether it was
    sent."""
    assert question.connection is not None
    single = not question.subject.endswith(".fetch")
    return question.connection.send(Answered(int(question.reply), payload, last or single))


class SocketDoor:
    """The socket of one kvbm, which holds the lock of the pool's directory."""

    def __init__(
        self,
        directory: Path,
        kvbm: str,
        subject: Callable[[str], str],
        receive: Callable[[SocketQuestion], Awaitable[None]],
    ) -> None:
        """`subject` names an operation as NATS's messages do; `receive` handles a request."""
        self._path = directory / SOCKET
        self._kvbm = kvbm
        self._subject = subject
        self._receive = receive
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._limited_log = RateLimitedLog()

    async def open(self) -> None:
        """Listen. Where that cannot be, say why: kvbm serves over NATS alone then."""
        if len(os.fsencode(self._path)) > _MOST_PATH_BYTES:
            _log.warning(
                "%s: over the %d bytes that a socket's path may have, so engines without NATS cannot connect",
                self._path,
                _MOST_PATH_BYTES,
            )
            return
        try:
            self._path.unlink(missing_ok=True)  # a former kvbm's: we hold the directory's lock
            mask = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._serve, self._path)
            finally:
                os.umask(mask)
        except OSError as wrong:
            _log.warning("%s: %s, so engines without NATS cannot connect", self._path, wrong.strerror or wrong)

    async def close(self) -> None:
        """Take no further requests."""
        if self._server is None:
            return
        self._server.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)  # their tasks see it

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._limited_log.warn(str(self._path), f"a connection is closed: {MOST_CONNECTIONS} are open")
            connection.close()
            return
        self._connections.add(connection)
        try:
            connection.send(Hello(PROTOCOL, self._kvbm))
            while data := await reader.read(_READ_BYTES):
                for question in connection.questions(data, self._subject):
                    await self._receive(question)
        except ProtocolError as wrong:
            self._limited_log.warn(str(self._path), f"a connection is closed: {wrong}")
        except OSError as wrong:
            _log.info("a connection ended: %s", wrong)
        finally:
            self._connections.discard(connection)
            connection.close()
