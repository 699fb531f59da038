"""Sends streamed chats or completions, reads their streams and measures each request.

    bytes ─▶ lines ─▶ `data: {…}` ─▶ text, usage, finish reason, error ─▶ [DONE]

The parser raises ProtocolError for a line that is not an SSE field and for data that is not a JSON object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw, Struct

from deploy.local.bench.loads import LoadRequest, prompt_text, prompt_tokens
from deploy.local.bench.rows import Outcome, Result
from deploy.local.size.token_client import ERROR_LIMIT_BYTES, error_text
from shared.errors import ProtocolError

CONNECT_LIMIT_S = 10.0
RETRY_LIMIT_S = 30.0
"""Limit of a Retry-After that is obeyed."""
REFUSED = (429, 503)
LINE_LIMIT_BYTES = 1 << 20
_JSON = {"Content-Type": "application/json"}
_FIELDS = (b":", b"event:", b"id:", b"retry:")
_BROKEN = ("abort", "error")
"""Finish reasons of answers that their engine gave up."""


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The newer name of that."""
    tool_calls: list[Raw] | None = None

    @property
    def any(self) -> bool:
        """Output of the model is in it. The chunk that only names a role has none."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class StreamUsage(Struct):
    """Token counts of the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """The prompt's tokens that were found in a cache. None if the server does not say it."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class _Error(Struct):
    message: str = ""


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: StreamUsage | None = None
    error: _Error | str | None = None
    object: str = ""
    """`error` if the chunk is one itself."""
    message: str = ""


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
        elif line.startswith(b"event:") and line[6:].strip() == b"error":
            self.error = self.error or "an event named error"
        elif line and not line.startswith(_FIELDS):
            raise ProtocolError(f"not server-sent events: {line[:40]!r}")

    def _data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = _CHUNK.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            raise ProtocolError(f"not a completion chunk: {wrong}") from None
        if chunk.error is not None:
            self.error = (chunk.error if isinstance(chunk.error, str) else chunk.error.message) or "an error"
        elif self.error or chunk.object == "error":
            self.error = chunk.message or self.error or "an error"
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finished = self.finished or choice.finish_reason is not None
            if choice.finish_reason in _BROKEN:
                self.error = self.error or f"finish reason {choice.finish_reason}"
            if choice.text or (choice.delta is not None and choice.delta.any):
                self.texts += 1


class Client:
    """A client of one endpoint."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], timeout_s: float, ids: Sequence[int]
    ) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._timeout_s = timeout_s
        self._ids = ids

    async def ask(self, ask: LoadRequest) -> Result:
        """Send a request and return its measured result, however it ends."""
        path, data = self._request(ask)
        asking = _Measurement(ask)
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.post(f"{self._url}/{path}", data=data, headers=_JSON) as response:
                    if response.status != 200:
                        return await asking.refused(response)
                    async for data in response.content.iter_any():
                        asking.feed(data)
            return asking.finish()
        except aiohttp.ServerTimeoutError:
            return asking.result("unreachable", f"no connection within {CONNECT_LIMIT_S:g} s")
        except TimeoutError:
            return asking.result("timed out", f"the answer did not end within {self._timeout_s:g} s")
        except ProtocolError as wrong:
            return asking.result("unreadable", str(wrong))
        except aiohttp.ClientConnectorError as wrong:
            return asking.result("unreachable", str(wrong))
        except aiohttp.ClientError as wrong:
            return asking.result("ended early", f"{type(wrong).__name__}: {wrong}")

    def _request(self, ask: LoadRequest) -> tuple[str, bytes]:
        """Return the path and the body of a request."""
        body = {**self._body, "max_tokens": ask.output}
        if self._ids:
            return "completions", msgspec.json.encode({**body, "prompt": prompt_tokens(ask, self._ids)})
        messages = [{"role": "user", "content": prompt_text(ask)}]
        return "chat/completions", msgspec.json.encode({**body, "messages": messages})


class _Measurement:
    """The clock of one request and what has arrived of its answer."""

    def __init__(self, ask: LoadRequest) -> None:
        self._ask = ask
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
        return self.result(outcome, f"{response.status}: {error_text(text)}", retry_after_s)

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
            cached_tokens=None if usage is None else usage.cached_tokens,
            retry_after_s=retry_after_s,
            sent_at_s=self._sent_s,
            turn=self._ask.turn,
            asked_tokens=self._ask.output,
        )


@asynccontextmanager
async def client(
    url: str, body: Mapping[str, Any], *, timeout_s: float, api_key: str, ids: Sequence[int] = ()
) -> AsyncIterator[Client]:
    """Yield a client. It opens a connection for each request in flight and keeps it for later requests. Prompts are
    made of the token `ids`; they are text if there are none."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        yield Client(http, url, body, timeout_s, ids)


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header; 0 for a date."""
    return min(float(retry_after), RETRY_LIMIT_S) if retry_after.isdecimal() else 0.0
