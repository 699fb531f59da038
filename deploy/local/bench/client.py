"""Sends streamed chats or completions, and measures each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from deploy.local.bench.images import noise_uri
from deploy.local.bench.loads import LoadRequest, prompt_text, prompt_tokens
from deploy.local.bench.rows import Outcome, Result
from deploy.local.size.chat_stream import ChatStream
from deploy.local.size.token_client import CONNECT_LIMIT_S, ERROR_LIMIT_BYTES, error_text
from shared.errors import ProtocolError

RETRY_LIMIT_S = 30.0
"""Limit of a Retry-After that is obeyed."""
REFUSED = (429, 503)
_JSON = {"Content-Type": "application/json"}


class Client:
    """A client of one endpoint. Prompts are made of the token `ids`; they are text if there are none."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        body: Mapping[str, Any],
        timeout_s: float,
        ids: Sequence[int],
        image_size: tuple[int, int] = (336, 336),
    ) -> None:
        """`image_size` is that of the images of requests that have some: width and height in pixels."""
        self._http = http
        self._url = url
        self._body = body
        self._timeout_s = timeout_s
        self._ids = ids
        self._image_size = image_size

    async def ask(self, ask: LoadRequest) -> Result:
        """Send a request and return its measured result, however it ends."""
        path, data = await asyncio.to_thread(self._request, ask) if ask.images else self._request(ask)
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
        content: str | list[dict[str, Any]] = prompt_text(ask)
        if ask.images:
            shown = [noise_uri(name, self._image_size) for name in ask.images]
            images = [{"type": "image_url", "image_url": {"url": uri}} for uri in shown]
            content = [{"type": "text", "text": content}, *images]
        messages = [{"role": "user", "content": content}]
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
            images=len(self._ask.images),
            asked_tokens=self._ask.output,
        )


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header; 0 for a date."""
    return min(float(retry_after), RETRY_LIMIT_S) if retry_after.isdecimal() else 0.0
