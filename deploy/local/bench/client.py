"""One measured request: chat completions, streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from deploy.local.bench.rows import Outcome, Result
from deploy.local.bench.sse_events import ChatStream
from shared.errors import ProtocolError, Unavailable

CONNECT_LIMIT_S = 10.0
RETRY_LIMIT_S = 30.0
"""What a server may ask to be left alone for."""
REFUSED = (429, 503)
ERROR_LIMIT_BYTES = 1 << 16


class Client:
    """Talks to one endpoint."""

    def __init__(self, http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], timeout_s: float) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._timeout_s = timeout_s

    async def ask(self, prompt: str) -> Result:
        """However it ends."""
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
            return asking.result("timed out", f"no end within {self._timeout_s:g} s")
        except ProtocolError as wrong:
            return asking.result("unreadable", str(wrong))
        except aiohttp.ClientConnectorError as wrong:
            return asking.result("unreachable", str(wrong))
        except aiohttp.ClientError as wrong:
            return asking.result("ended early", f"{type(wrong).__name__}: {wrong}")

    async def models(self) -> list[str]:
        """Those that are served. Raises Unavailable."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._http.get(f"{self._url}/models") as response:
                answer = await response.json(content_type=None)
                return [str(model["id"]) for model in answer["data"]]
        except (TimeoutError, aiohttp.ClientError) as wrong:
            raise Unavailable(f"{self._url} does not answer: {wrong or 'too slow'}") from None
        except (ValueError, KeyError, TypeError):
            raise Unavailable(f"{self._url}/models does not list models: is it an OpenAI endpoint?") from None


class _Measurement:
    """One request's clock and what came."""

    def __init__(self) -> None:
        self._clock = time.perf_counter  # the loop's has milliseconds, and stands still within a turn
        self._sent_s = self._clock()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._gaps_s: list[float] = []
        self._events = ChatStream()

    def feed(self, data: bytes) -> None:
        """Raises ProtocolError."""
        now_s = self._clock() - self._sent_s
        texts = self._events.feed(data)
        if not texts:
            return
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_s)
        self._gaps_s.extend([0.0] * (texts - 1))  # they came together
        self._last_s = now_s

    def finish(self) -> Result:
        """The response has ended."""
        if self._events.error:
            return self.result("failed", self._events.error)
        return self.result("done") if self._events.finished else self.result("ended early", "no finish reason")

    async def refused(self, response: aiohttp.ClientResponse) -> Result:
        """An HTTP status is the answer."""
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
    """As many connections as there are requests in flight, kept for the next ones."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        yield Client(http, url, body, timeout_s)


def _seconds(retry_after: str) -> float:
    """A date instead of seconds is not honoured."""
    return min(float(retry_after), RETRY_LIMIT_S) if retry_after.isdecimal() else 0.0


def _message(text: bytes) -> str:
    """Of OpenAI's error object, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace").strip()
