"""Asks an OpenAI endpoint for completions of prompts that are token ids, and takes the times of their tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from deploy.local.size.chat_stream import ChatStream
from shared.errors import MALFORMED, ConfigError, ProtocolError, Unavailable
from shared.installation import COMMAND
from shared.outbound import describe_fault

CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 600.0
ERROR_LIMIT_BYTES = 1 << 16
LIST_LIMIT_BYTES = 16 << 20
"""The largest list of models that is read."""
PASSING = (408, 409, 425, 429)
"""The statuses from 400 to 499 after which the same request may be answered."""
KEY_HINT = "give the key with --api-key-file FILE or in the environment variable OPENAI_API_KEY"
PLAIN_TEXT = "water river wheel mill stone gate flow dam weir basin valley bridge boat rope oak iron grain bread " * 8
FALLBACK_IDS = range(300, 900)
"""The ids that prompts are made of where the endpoint has no /tokenize."""


class TimedAnswer(Struct, frozen=True):
    """The times of one answer, in seconds of one clock that all answers share."""

    sent_s: float
    first_s: float
    last_s: float
    tokens: int
    cached_tokens: int | None
    """The prompt's tokens that were found in a cache. None if the server does not say it."""
    gaps_s: tuple[float, ...] = ()
    """The times between pieces of the answer."""


class _Tokens(Struct):
    tokens: list[int] = []


class _FleetModel(Struct):
    name: str
    workers: int


class _FleetWorker(Struct):
    model: str


class _Fleet(Struct):
    """What a Headrace's page says of its fleet."""

    models: list[_FleetModel]
    workers: list[_FleetWorker]
    """The workers of all roles; `models` counts those that decode."""


class TokenClient:
    """A client of one endpoint and model."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str) -> None:
        self._http = http
        self._url = url
        self._root = url.removesuffix("/v1")
        self.model = model
        self.ids: Sequence[int] = FALLBACK_IDS
        """The ids that prompts are made of."""

    async def models(self) -> list[str]:
        """Return the models that the endpoint serves. Raise Unavailable."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._http.get(f"{self._url}/models") as response:
                if response.status != 200:
                    said = error_text(await response.content.read(ERROR_LIMIT_BYTES)).rstrip(".")
                    hint = f"; {KEY_HINT}" if response.status == 401 else ""
                    raise Unavailable(f"{self._url}/models: status {response.status}: {said}{hint}")
                text = bytearray()
                async for piece in response.content.iter_any():
                    text += piece
                    if len(text) > LIST_LIMIT_BYTES:
                        raise Unavailable(f"{self._url}/models has more than {LIST_LIMIT_BYTES} bytes")
                return [str(model["id"]) for model in json.loads(text)["data"]]
        except (TimeoutError, aiohttp.ClientError) as wrong:
            why = "too slow" if isinstance(wrong, TimeoutError) else describe_fault(wrong, "SSL_CERT_FILE")
            raise Unavailable(f"{self._url} does not answer: {why}; does `{COMMAND} up` run? (--state)") from None
        except (ValueError, KeyError, TypeError):
            raise Unavailable(f"{self._url}/models does not list models: is it an OpenAI endpoint?") from None

    async def learn_ids(self) -> None:
        """Ask which token ids are plain words, so that each token of an answer has text."""
        body = {"model": self.model, "prompt": PLAIN_TEXT, "add_special_tokens": False}
        try:
            async with (
                asyncio.timeout(CONNECT_LIMIT_S),
                self._http.post(f"{self._root}/tokenize", json=body) as response,
            ):
                found = msgspec.json.decode(await response.content.read(ERROR_LIMIT_BYTES), type=_Tokens).tokens
        except (TimeoutError, aiohttp.ClientError, *MALFORMED):
            return
        if response.status == 200 and len(set(found)) > 8:
            self.ids = sorted(set(found))

    async def version(self) -> str:
        """Return the version that the endpoint says at /version; empty if it says none."""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._http.get(f"{self._root}/version") as response:
                said = msgspec.json.decode(await response.content.read(ERROR_LIMIT_BYTES), type=dict[str, Any])
        except (TimeoutError, aiohttp.ClientError, *MALFORMED):
            return ""
        return str(said.get("version", "")) if response.status == 200 else ""

    async def workers(self) -> int:
        """Return how many workers serve the model, as a Headrace's page says. 0 if the endpoint does not say it."""
        text = b""
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S), self._http.get(f"{self._root}/ui/events") as response:
                if response.status != 200:
                    return 0
                async for piece in response.content.iter_any():
                    text += piece
                    if b"\n\n" in text or len(text) > LIST_LIMIT_BYTES:
                        break
            event = text.partition(b"\n\n")[0].removeprefix(b"data:")
            fleet = msgspec.json.decode(event, type=_Fleet)
        except (TimeoutError, aiohttp.ClientError, *MALFORMED):
            return 0
        named = next((each.workers for each in fleet.models if each.name == self.model), 0)
        return max(named, sum(each.model == self.model for each in fleet.workers))

    def prompt(self, seed: str, tokens: int) -> list[int]:
        """Return a prompt that follows from its seed."""
        return Random(seed).choices(self.ids, k=tokens)  # noqa: S311 - a load, no secret

    async def ask(self, prompt: Sequence[int], tokens: int) -> TimedAnswer:
        """Ask for exactly that many tokens. Raise Unavailable; ConfigError if asking again would not help."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream, times_s = ChatStream(), list[float]()
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                async with self._http.post(f"{self._url}/completions", json=body) as response:
                    if response.status != 200:
                        said = error_text(await response.content.read(ERROR_LIMIT_BYTES))
                        lasts = 400 <= response.status < 500 and response.status not in PASSING
                        wrong = f"{self._url}/completions: status {response.status}: {said[:300]}"
                        raise ConfigError(wrong) if lasts else Unavailable(wrong)
                    async for data in response.content.iter_any():
                        now_s = time.perf_counter()
                        stream.feed(data)
                        times_s += [now_s] * (stream.pieces - len(times_s))
        except TimeoutError:
            raise Unavailable(f"{self._url}: an answer of {tokens} tokens took over {ANSWER_LIMIT_S:g} s") from None
        except (aiohttp.ClientError, ProtocolError) as wrong:
            raise Unavailable(f"{self._url}: {wrong or type(wrong).__name__}") from None
        if stream.error:
            raise Unavailable(f"{self._url}: {stream.error}")
        if not times_s or stream.usage is None:
            raise Unavailable(f"{self._url}: the answer has no tokens, or no usage: is it an OpenAI endpoint?")
        return TimedAnswer(
            sent_s=sent_s,
            first_s=times_s[0],
            last_s=times_s[-1],
            tokens=stream.usage.completion_tokens,
            cached_tokens=stream.usage.cached_tokens,
            gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        )


def error_text(text: bytes) -> str:
    """Return the message of an OpenAI error object, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace").strip()


def http_session(api_key: str) -> aiohttp.ClientSession:
    """Return a session that opens a connection for each request in flight, and keeps it for later ones."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout)


@asynccontextmanager
async def token_client(url: str, model: str, api_key: str) -> AsyncIterator[TokenClient]:
    """Yield a client of one endpoint."""
    async with http_session(api_key) as http:
        yield TokenClient(http, url, model)
