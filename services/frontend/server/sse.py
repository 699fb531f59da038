"""Writes the body of an HTTP answer, as server-sent events, lines or a whole, straight to the transport.

    headers ──▶ chunks as the kernel accepts them:  %x CRLF  data: … LF LF  CRLF  ──▶ last events, end of the body

    try_send   sends a chunk with one send(2); returns False while the kernel has not accepted all of the one before
    write      waits for that, at most `unread_s`: a client that has not read by then loses its connection

    SilenceTimer: half a second without text ──▶ headers;  `silent_s` without anything ──▶ a comment

So what a slow client has not read waits as tokens in its Stream. No more than a chunk waits here; the kernel holds as
much as the client's window allows, plus UNSENT_BYTES of the port.

Only this module knows about chunk framing and the write buffer. aiohttp writes the first chunk, with the headers, and
the end. A chunk costs 0.3 µs here, 0.7 µs in uvloop and 5 to 8 µs in the kernel; waking a task to await aiohttp's
`write` cost about 10 µs more.

Chunks are written in the turn in which their frame comes, and no task wakes for a token: that cost 30 µs a token at 512
streams, and this takes 14 to 17.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from aiohttp import HttpVersion11, web

from services.frontend.serving.reply import Framing

HEADERS_S = 0.5
"""Seconds without text after which the headers are sent. An error before that can still be a status."""
CHUNK_BYTES = 64 << 10
"""Bytes of a chunk at most; longer ones are split, so that a client that reads slowly does not look like one that does
not read."""


class _Response(web.StreamResponse):
    """A response whose headers leave in the same send(2) as its first chunk, which saves 3 % of a short request."""

    _send_headers_immediately = False  # like aiohttp's own Response


class ResponseBody:
    """The body of one response, from its headers to its end."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        unread_s: float,
        framing: Framing = "data",
        status: int = 200,
    ) -> None:
        """Raise ConnectionError if the client has already disconnected."""
        if request.transport is None:
            raise ConnectionResetError("the client has disconnected")
        self._request = request
        self._transport = request.transport
        self._response = _Response(headers=headers, status=status)
        self._chunked = request.version >= HttpVersion11
        self._unread_s = unread_s
        self._lead = _LEADS[framing]
        """What precedes an event. None means its name, which differs."""
        self._end = _ENDS.get(framing, b"\n\n")
        self._held = b""
        """Events that leave together with the next one."""
        self.silent = True
        """Whether nothing was sent since SilenceTimer has looked."""

    @property
    def begun(self) -> bool:
        """Whether the headers have been sent."""
        return self._response.prepared

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers, unless they have been sent."""
        if not self.begun:
            self._response.headers.update(headers)

    def try_send(self, payload: bytes) -> bool:
        """Send an event now. False if the client has not read the one before, or has disconnected. The body must have
        begun."""
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        self.silent = False
        lead, end = _named_lead(payload) if self._lead is None else self._lead, self._end
        if self._chunked:
            transport.write(b"%x\r\n%b%b%b\r\n" % (len(lead) + len(payload) + len(end), lead, payload, end))
        else:
            transport.write(b"%b%b%b" % (lead, payload, end))
        return True

    async def write(self, payload: bytes, *, more: bool = False) -> None:
        """Send an event as soon as the client reads, a comment for an empty one; with `more`, hold it until the next.

        Raise ConnectionError if the client has disconnected or does not read.
        """
        self._hold(payload)
        if not more:
            await self._flush()

    def _hold(self, payload: bytes) -> None:
        if not payload:
            self._held += _COMMENT
            return
        self._held += b"%b%b%b" % (_named_lead(payload) if self._lead is None else self._lead, payload, self._end)

    async def _flush(self) -> None:
        held, self._held = self._held, b""
        self.silent = False
        for start in range(0, len(held), CHUNK_BYTES):
            chunk = held[start : start + CHUNK_BYTES]
            if self.begun:
                await self._drained()
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._chunked else chunk)
            else:
                await self._begin()
                with self._abort_if_unread():
                    await self._response.write(chunk)

    async def end(self, payload: bytes | None) -> web.StreamResponse:
        """Send the last event, if any, and end the body. Raise ConnectionError like `write`."""
        if payload is not None:
            self._hold(payload)
        if len(self._held) > CHUNK_BYTES:
            await self._flush()
        await (self._drained() if self.begun else self._begin())
        with self._abort_if_unread():
            await self._response.write_eof(self._held)
        return self._response

    async def break_off(self, event: bytes | None) -> web.StreamResponse:
        """End a raw body that has begun and is not whole: with an event, or if there is none by closing the connection,
        so that its client does not take it for whole. Raise ConnectionError like `write`."""
        if event is not None:
            return await self.end(event)
        await self._drained()
        self._transport.abort()
        return self._response

    async def write_all(self, payload: bytes) -> web.StreamResponse:
        """Send `payload` as the whole body, in place of events. Raise ConnectionError like `write`."""
        self._response.content_length = len(payload)
        await self._begin()
        for start in range(0, len(payload), CHUNK_BYTES):
            with self._abort_if_unread():
                await self._response.write(payload[start : start + CHUNK_BYTES])
            await self._drained()
        with self._abort_if_unread():
            await self._response.write_eof()
        return self._response

    async def _begin(self) -> None:
        """Prepare the headers; they leave with what is written next."""
        self._transport.set_write_buffer_limits(high=0)  # `drain` then waits until the buffer is empty
        await self._response.prepare(self._request)

    async def _drained(self) -> None:
        """Wait until the kernel has accepted all that was written."""
        if self._transport.get_write_buffer_size():
            with self._abort_if_unread():
                await self._request.writer.drain()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has disconnected")

    @contextmanager
    def _abort_if_unread(self) -> Iterator[None]:
        abort = _call_later(self._unread_s, self._transport.abort)  # `close` would wait until the rest is read
        try:
            yield
        finally:
            abort.cancel()


class SilenceTimer:
    """Calls `wake` whenever a body has been silent for `silent_s`, and once after HEADERS_S. One timer serves a body:
    what is sent does not touch it."""

    def __init__(self, body: ResponseBody, wake: Callable[[], None], silent_s: float) -> None:
        """Start it. 0 seconds: it does nothing."""
        self._body = body
        self.wake = wake
        self._period_s = silent_s / 2
        self._timer = None if not silent_s else _call_later(min(HEADERS_S, silent_s), self._look)

    def _look(self) -> None:
        if self._body.silent:
            self.wake()
        self._body.silent = True
        self._timer = _call_later(self._period_s, self._look)

    def close(self) -> None:
        """Stop calling `wake`."""
        if self._timer is not None:
            self._timer.cancel()


def _call_later(seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call)


_LEADS: dict[Framing, bytes | None] = {"data": b"data: ", "event": None, "line": b"", "raw": b""}
_ENDS: dict[Framing, bytes] = {"line": b"\n", "raw": b""}


def _named_lead(payload: bytes) -> bytes:
    """Return what precedes an event {"type":"name",…} on the wire: its name."""
    return b"event: %b\ndata: " % payload[_NAME_AT : payload.index(b'"', _NAME_AT)]


_COMMENT = b": waiting\n\n"
"""An event that clients skip."""
_NAME_AT = len(b'{"type":"')
