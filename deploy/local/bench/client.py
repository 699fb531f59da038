"""Sends streamed chat completions, reads their streams and measures each request.

    bytes ─▶ lines ─▶ `data: {…}` ─▶ text, usage, finish reason, error ─▶ [DONE]

The parser raises ProtocolError for a line that is not an SSE field and for data that is not a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from deploy.local.bench.rows import Outcome, Result
from shared.errors import ProtocolError, Unavailable

CONNECT_LIMIT_S = 10.0
RETRY_LIMIT_S = 30.0
"""Limit of a Retry-After that is obeyed."""
REFUSED = (429, 503)
ERROR_LIMIT_BYTES = 1 << 16
LIST_LIMIT_BYTES = 16 << 20
"""The largest list of models that is read."""
KEY_HINT = "give the key with --api-key-file FILE or in the environment variable OPENAI_API_KEY"
LINE_LIMIT_BYTES = 1 << 20
_FIELDS = (b":", b"event:", b"id:", b"retry:")


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class StreamUsage(Struct):
    """Token counts of the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(Struct):
    message: str = ""


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: StreamUsage | None = None
    error: _Error | str | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class ChatStream:
    """The parser of one stream, with what it has found so far. Its methods raise ProtocolError for a line that is not
    an SSE field and for data that is not a JSON object.

    bytes ─▶ lines ─▶ `data: {…}` ─▶ text, usage, finish reason, error ─▶ [DONE]
    """

    def __init__(self) -> None:
        self.texts = 0
        """Number of events with text so far."""
        self.usage: StreamUsage | None = None
        self.finished = False
        """True once a finish reason or [DONE] has arrived."""
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Parse further bytes; return how many events with text they complete. Raise ProtocolError."""
        before = self.texts
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            raise ProtocolError(f"a line of the stream is longer than {LINE_LIMIT_BYTES} bytes")
        for line in whole:
            self._line(line.rstrip(b"\r"))
        return self.texts - before

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data(line[5:].strip())
        elif line and not line.startswith(_FIELDS):
            raise ProtocolError(f"not server-sent events: {line[:40]!r}")

    def _data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = _CHUNK.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            raise ProtocolError(f"not a chat completion chunk: {wrong}") from None
        if chunk.error is not None:
            self.error = chunk.error if isinstance(chunk.error, str) else chunk.error.message
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finished = self.finished or choice.finish_reason is not None
            if choice.delta is not None and (choice.delta.content or choice.delta.reasoning_content):
                self.texts += 1


class Client:
    """A client of one endpoint."""

    def __init__(self, http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], timeout_s: float) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._timeout_s = timeout_s

    async def ask(self, prompt: str) -> Result:
        """Send a request and return its measured result, however it ends."""
        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        asking = _Measurement()
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.post(f"{self._url}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return await asking.refused(response)
                    async for data in response.content.iter_any():
                        asking.feed(data)
            return asking.finish()
        except TimeoutError:
            return asking.result("timed out", f"the answer did not end within {self._timeout_s:g} s")
        except ProtocolError as wrong:
            return asking.result("unreadable", str(wrong))
        except aiohttp.ClientConnectorError as wrong:
            return asking.result("unreachable", str(wrong))
        except aiohttp.ClientError as wrong:
            return asking.result("ended early", f"{type(wrong).__name__}: {wrong}")

    async def models(self) -> list[str]:
        """Return the models that the endpoint serves. Raise Unavailable."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._http.get(f"{self._url}/models") as response:
                if response.status != 200:
                    said = _message(await response.content.read(ERROR_LIMIT_BYTES)).rstrip(".")
                    hint = f"; {KEY_HINT}" if response.status == 401 else ""
                    raise Unavailable(f"{self._url}/models: status {response.status}: {said}{hint}")
                text = bytearray()
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > LIST_LIMIT_BYTES:
                        raise Unavailable(f"{self._url}/models has more than {LIST_LIMIT_BYTES} bytes")
                return [str(model["id"]) for model in json.loads(text)["data"]]
        except (TimeoutError, aiohttp.ClientError) as wrong:
            raise Unavailable(f"{self._url} does not answer: {wrong or 'too slow'}") from None
        except (ValueError, KeyError, TypeError):
            raise Unavailable(f"{self._url}/models does not list models: is it an OpenAI endpoint?") from None


class _Measurement:
    """The clock of one request and what has arrived of its answer."""

    def __init__(self) -> None:
        self._clock = time.perf_counter  # the event loop's clock has a coarser resolution
        self._sent_s = self._clock()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps_s: list[float] = []
        self._events = ChatStream()

    def feed(self, data: bytes) -> None:
        """Count the events in received bytes. Raise ProtocolError."""
        now_s = self._clock() - self._sent_s
        texts = self._events.feed(data)
        if not texts:
            return
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_s)
        self._gaps_s.extend([0.0] * (texts - 1))  # these events came together
        self._last_s = now_s

    def finish(self) -> Result:
        """Return the result of a response that has ended."""
        if self._events.error:
            return self.result("failed", self._events.error)
        return self.result("done") if self._events.finished else self.result("ended early", "no finish reason")

    async def refused(self, response: aiohttp.ClientResponse) -> Result:
        """Return the result of a response whose HTTP status is not 200."""
        outcome: Outcome = "refused" if response.status in REFUSED else "failed"
        text = await response.content.read(ERROR_LIMIT_BYTES)
        retry_after_s = _seconds(response.headers.get("Retry-After", ""))
        return self.result(outcome, f"{response.status}: {_message(text)}", retry_after_s)

    def result(self, outcome: Outcome, reason: str = "", retry_after_s: float = 0.0) -> Result:
        usage = self._events.usage
        return Result(
            outcome=outcome,
            reason=reason[:200],
            first_s=self._first_s,
            last_s=self._last_s,
            ended_s=self._clock() - self._sent_s,
            gaps_s=tuple(self._gaps_s),
            events=self._events.texts,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            retry_after_s=retry_after_s,
        )


@asynccontextmanager
async def client(url: str, body: Mapping[str, Any], *, timeout_s: float, api_key: str) -> AsyncIterator[Client]:
    """Yield a client. It opens a connection for each request in flight and keeps it for later requests."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        yield Client(http, url, body, timeout_s)


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header; 0 for a date."""
    return min(float(retry_after), RETRY_LIMIT_S) if retry_after.isdecimal() else 0.0


def _message(text: bytes) -> str:
    """Return the message of an OpenAI error object, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace").strip()
