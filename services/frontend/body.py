"""The streamed body of an HTTP answer: server-sent events, written straight to the transport.

    prepared ── write, push ──▶ one chunk each:  %x CRLF  data: … LF LF  CRLF        one send(2)
                     │
                     └─ more than BUFFER_BYTES wait in the transport: `push` refuses and `write` waits, until a quarter
                        is left; after `unread_s` the client does not read, and its connection is ended

This is the one place that knows of chunk framing and of the write buffer. A chunk costs 1.3 µs here, the kernel's send
apart; aiohttp's own `write`, a coroutine that is woken by an event, cost 15 at 512 streams. Headers and the end of the
body are aiohttp's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import HttpVersion11, web

BUFFER_BYTES = 16 << 10
"""What may wait in the transport, and as much again in the kernel, beyond what the client's own window takes."""


class Body:
    """One response, from its headers to its end."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], *, unread_s: float) -> None:
        self._request = request
        self._protocol = request.protocol
        self._response = web.StreamResponse(headers=headers)
        self._chunked = request.version >= HttpVersion11
        self._unread_s = unread_s
        self._held = b""
        """Events that go out together with the next one."""

    @property
    def begun(self) -> bool:
        """Whether the headers are sent."""
        return self._response.prepared

    def push(self, payload: bytes) -> bool:
        """Send an event, or say that the client is behind (or gone). Only once the body has begun."""
        transport = self._protocol.transport
        if transport is None or self._protocol.writing_paused:
            return False
        if self._chunked:
            transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(payload) + 8, payload))
        else:
            transport.write(b"data: %b\n\n" % payload)
        return True

    async def write(self, payload: bytes, *, more: bool = False) -> None:
        """Send an event once the client takes it; with `more` it waits for the next one.

        Raises ConnectionError when the client has gone, or does not read.
        """
        self._held += b"data: %b\n\n" % payload
        if more:
            return
        await self._ready()
        held, self._held = self._held, b""
        transport = self._protocol.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        transport.write(b"%x\r\n%b\r\n" % (len(held), held) if self._chunked else held)

    async def end(self, payload: bytes) -> web.StreamResponse:
        """Send the last event and the end of the body. Raises as `write`."""
        await self._ready()
        async with self._patience():
            await self._response.write_eof(b"%bdata: %b\n\n" % (self._held, payload))
        return self._response

    async def _ready(self) -> None:
        """Headers sent, and room for a chunk."""
        if not self._response.prepared:
            await self._begin()
        if self._protocol.writing_paused:
            async with self._patience():
                await self._request.writer.drain()

    async def _begin(self) -> None:
        transport = self._protocol.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BUFFER_BYTES)
        await self._response.prepare(self._request)

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Bounds a wait for the client."""
        try:
            async with asyncio.timeout(self._unread_s):
                yield
        except TimeoutError:
            if self._protocol.transport is not None:
                self._protocol.transport.abort()  # closing would wait until the rest is read
            raise ConnectionAbortedError(f"the client has not read for {self._unread_s:g} s") from None
