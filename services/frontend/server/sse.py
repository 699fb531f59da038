"""The streamed body of an HTTP answer: server-sent events, written straight to the transport.

    headers ──▶ chunks, each as the kernel takes it:  %x CRLF  data: … LF LF  CRLF  ──▶ last events, end of the body

    send   a chunk, one send(2); refused as long as the kernel has not taken all of the one before
    write  waits for that, and for no longer than `unread_s`: then the client does not read, and loses its connection

So what a slow client leaves waits as tokens in its Stream, and here no more than a chunk; in the kernel it is what the
client's own window takes, and UNSENT_BYTES.

This is the one place that knows of chunk framing and of the write buffer; the end is aiohttp's, and so is the first
chunk, with the headers. A chunk costs 0.3 µs here, 0.7 in uvloop and 5 to 8 in the kernel; a task woken for it, to
await aiohttp's `write`, cost some 10 more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import HttpVersion11, web

UNSENT_BYTES = 16 << 10
"""What the kernel keeps beyond the client's window; it would take 4 MiB by itself."""
CHUNK_BYTES = 64 << 10
"""Longer ones are cut, so that a client that reads them slowly is one that reads."""


class _Response(web.StreamResponse):
    """With its headers in the first chunk's send(2) and not in one of their own: 3 % of a short request."""

    _send_headers_immediately = False  # as in aiohttp's own Response


class ResponseBody:
    """One response, from its headers to its end."""

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], *, unread_s: float, named: bool = False
    ) -> None:
        """`named`: an event's name is what its first field, `type`, says. Raises ConnectionError where the client has
        gone already."""
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        self._request = request
        self._transport = request.transport
        self._response = _Response(headers=headers)
        self._chunked = request.version >= HttpVersion11
        self._unread_s = unread_s
        self._named = named
        self._held = b""
        """Events that go out with the next one."""

    @property
    def begun(self) -> bool:
        """Whether the headers are sent."""
        return self._response.prepared

    def try_send(self, payload: bytes) -> bool:
        """An event, now; or False: the client is behind, or gone. Only once the body has begun."""
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        lead = _lead(payload) if self._named else b"data: "
        if self._chunked:
            transport.write(b"%x\r\n%b%b\n\n\r\n" % (len(lead) + len(payload) + 2, lead, payload))
        else:
            transport.write(b"%b%b\n\n" % (lead, payload))
        return True

    async def write(self, payload: bytes, *, more: bool = False) -> None:
        """An event, once the client takes it; with `more` it is held for the next one.

        Raises ConnectionError when the client has gone, or does not read.
        """
        self._hold(payload)
        if not more:
            await self._flush()

    def _hold(self, payload: bytes) -> None:
        self._held += b"%b%b\n\n" % (_lead(payload) if self._named else b"data: ", payload)

    async def _flush(self) -> None:
        held, self._held = self._held, b""
        for start in range(0, len(held), CHUNK_BYTES):
            chunk = held[start : start + CHUNK_BYTES]
            if self.begun:
                await self._taken()
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)
            else:
                await self._begin()
                async with self._patience():
                    await self._response.write(chunk)

    async def end(self, payload: bytes | None) -> web.StreamResponse:
        """The last event, if there is one more, and the end of the body. Raises as `write` does."""
        if payload is not None:
            self._hold(payload)
        if len(self._held) > CHUNK_BYTES:
            await self._flush()
        await (self._taken() if self.begun else self._begin())
        async with self._patience():
            await self._response.write_eof(self._held)
        return self._response

    async def write_all(self, payload: bytes) -> web.StreamResponse:
        """The body, instead of events: not chunked, but cut alike. Raises as `write` does."""
        self._response.content_length = len(payload)
        await self._begin()
        for start in range(0, len(payload), CHUNK_BYTES):
            async with self._patience():
                await self._response.write(payload[start : start + CHUNK_BYTES])
            await self._taken()
        async with self._patience():
            await self._response.write_eof()
        return self._response

    async def _begin(self) -> None:
        """Up to the headers, which go with what the response is given to write next."""
        self._transport.set_write_buffer_limits(high=0)  # `drain` waits until nothing is left
        connection: socket.socket = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        await self._response.prepare(self._request)

    async def _taken(self) -> None:
        """Until the kernel has taken what was written."""
        if self._transport.get_write_buffer_size():
            async with self._patience():
                await self._request.writer.drain()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._unread_s):
                yield
        except TimeoutError:
            self._transport.abort()  # closing would wait until the rest is read
            raise ConnectionAbortedError(f"the client has not read for {self._unread_s:g} s") from None


def _lead(payload: bytes) -> bytes:
    """What comes before an event that names itself: {"type":"name",…}."""
    return b"event: %b\ndata: " % payload[_NAME_AT : payload.index(b'"', _NAME_AT)]


_NAME_AT = len(b'{"type":"')
