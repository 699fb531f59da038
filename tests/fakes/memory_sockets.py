"""Unix sockets inside one process: bytes arrive whole and in order, until either side ends.

    connect ──▶ MemoryStream ◀── the event loop, in either side's context ──▶ StreamReader, StreamWriter

So what is sent to a process that is frozen waits, and a connection to one whose queue is not looked at is made.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from itertools import count
from pathlib import Path

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], None]
"""Takes a connection, and its number: higher than those of all earlier ones."""


class MemoryStream:
    """The connecting side, a `services.worker.kv_connector.socket_client.KvbmStream`."""

    def __init__(self, reader: asyncio.StreamReader, server: Context, arrived: Callable[[], None]) -> None:
        self.context = copy_context()
        self._reader = reader
        self._server = server
        self._arrived = arrived
        self._inbox = deque[bytes]()
        self._ended = False
        self._closed = False

    def receive(self) -> bytes | None:
        if self._inbox:
            return self._inbox.popleft()
        return b"" if self._ended else None

    def send(self, data: bytes) -> int:
        if self._ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        asyncio.get_running_loop().call_soon(self._reader.feed_data, data, context=self._server)
        return len(data)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if not self._closed:
            self._closed = self._ended = True
            asyncio.get_running_loop().call_soon(self._reader.feed_eof, context=self._server)

    def take(self, data: bytes) -> None:
        """Bytes have come; none are the end."""
        if not self._ended:
            self._ended = not data
            if data:
                self._inbox.append(data)
            self._arrived()


class _Transport(asyncio.Transport):
    """The listening side's way to a MemoryStream."""

    def __init__(self, stream: MemoryStream, protocol: asyncio.StreamReaderProtocol) -> None:
        super().__init__()
        self._stream = stream
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._loop.call_soon(self._stream.take, bytes(data), context=self._stream.context)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._stream.take, b"", context=self._stream.context)
            self._loop.call_soon(self._protocol.connection_lost, None)

    abort = close


class MemorySockets:
    """The sockets of one machine, by their paths."""

    def __init__(self) -> None:
        self._listening: dict[Path, tuple[Serve, Context]] = {}
        self._streams: dict[Path, list[MemoryStream]] = {}
        self._numbers = count(1)

    def listen(self, path: Path, serve: Serve) -> None:
        """Have `serve` take each connection to `path`, in the context of this call."""
        self._listening[path] = serve, copy_context()
        self._streams[path] = []

    def unlisten(self, path: Path) -> None:
        """Refuse new connections."""
        self._listening.pop(path, None)

    def break_all(self, path: Path) -> None:
        """The listening process is dead: every connection to it ends."""
        self.unlisten(path)
        for stream in self._streams.pop(path, ()):
            asyncio.get_running_loop().call_soon(stream.take, b"", context=stream.context)

    def connect(self, path: Path, arrived: Callable[[], None]) -> MemoryStream:
        """Connect; `arrived` is called when bytes or the end have come. Raise ConnectionRefusedError."""
        if path not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        serve, context = self._listening[path]
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        stream = MemoryStream(reader, context, arrived)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport = _Transport(stream, protocol)
        protocol.connection_made(transport)
        self._streams[path].append(stream)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        loop.call_soon(serve, reader, writer, next(self._numbers), context=context)
        return stream
