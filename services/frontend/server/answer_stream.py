"""One streamed answer over HTTP, from when its body is decoded.

    open ──▶ the prompt is tokenised, its grammar compiled ──▶ send ──▶ the reply's chunks ──▶ end
               │                                                │
               └─ silence: headers, then signs of life          └─ silence: the reply is woken, and has its own

A failure before the headers are sent can still be a status; a later one is the stream's last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from aiohttp import web

from services.frontend.protocol.errors import Failure
from services.frontend.server.sse import ResponseBody, SilenceTimer
from services.frontend.serving.dispatch import Reply
from services.frontend.serving.reply import SILENCE, Framing, Opening

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",  # keeps nginx from collecting chunks
}
_HEADERS: dict[Framing, dict[str, str]] = {
    "data": _SSE_HEADERS,
    "event": _SSE_HEADERS,
    "raw": {},
    "line": {**_SSE_HEADERS, "Content-Type": "application/x-ndjson"},
}


class AnswerStream:
    """The stream of one request, if it asks for one."""

    def __init__(self, request: web.Request, *, unread_s: float, silent_s: float) -> None:
        """Create it. `unread_s` and `silent_s` are those of the settings."""
        self.headers: Callable[[], Mapping[str, str]] = dict
        """Returns more headers, as far as they are known."""
        self._request = request
        self._unread_s = unread_s
        self._silent_s = silent_s
        self._opening = Opening()
        self._body: ResponseBody | None = None
        self._silence: SilenceTimer | None = None
        self._sign: asyncio.Task[None] | None = None
        """Writes a sign of life while there is no reply."""

    def open(self, opening: Opening) -> None:
        """Begin: from now on the stream is not silent for long. Raise ConnectionError if the client has
        disconnected."""
        self._opening = opening
        headers = _HEADERS[opening.framing]
        self._body = ResponseBody(self._request, headers, unread_s=self._unread_s, framing=opening.framing)
        self._silence = SilenceTimer(self._body, self._write_sign, self._silent_s)

    async def send(self, reply: Reply) -> None:
        """Send all chunks of the reply but the end of the body. Raise the error that ends the answer, and
        ConnectionError if the client has disconnected or does not read."""
        assert self._body is not None, "a reply that is a stream was announced"
        assert self._silence is not None
        await self._settle()
        self._silence.wake = reply.wake
        self._opening = Opening(reply.framing, error_events=lambda failure: [reply.error_chunk(failure)])
        self._body.add_headers(self.headers())
        async for chunk in reply.chunks(self._body.try_send):
            await self._body.write(chunk.payload, more=chunk.more)

    async def end(self) -> web.StreamResponse:
        """End a complete answer."""
        assert self._body is not None
        return await self._body.end(b"[DONE]" if self._opening.framing == "data" else None)

    async def fail(self, failure: Failure) -> web.StreamResponse | None:
        """End the stream with a failure; None if nothing of it was sent. Raise ConnectionError like `send`."""
        await self._settle()
        if self._body is None or not self._body.begun:
            return None
        *events, last = self._opening.error_events(failure)
        for event in events:
            await self._body.write(event, more=True)
        return await self._body.end(last)

    def close(self) -> None:
        """Stop what sends signs of life."""
        if self._silence is not None:
            self._silence.close()
        if self._sign is not None:
            self._sign.cancel()

    def _write_sign(self) -> None:
        if self._sign is None or self._sign.done():
            self._sign = asyncio.create_task(self._write(), name="sign of life")

    async def _write(self) -> None:
        assert self._body is not None
        self._body.add_headers(self.headers())
        *events, last = self._opening.silence_events() or [SILENCE]
        with suppress(ConnectionError):  # aiohttp cancels the request
            for event in events:
                await self._body.write(event, more=True)
            await self._body.write(last)

    async def _settle(self) -> None:
        """Wait until no sign of life is being written."""
        sign, self._sign = self._sign, None
        if sign is not None:
            await sign
