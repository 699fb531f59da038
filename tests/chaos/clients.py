"""Clients: the official `openai` one at each frontend, and a plain NATS client. They try once, and tell what they saw.

A client whose frontend takes no connection, or said lately that it is not ready, goes to the next one, as a balancer
would, and one that NATS tells that no frontend listens asks again soon: its request went nowhere yet. Nothing else is
tried again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import httpx2
import msgspec
import nats
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from openai import APIConnectionError, APIError, AsyncOpenAI, AsyncStream
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from shared import subjects
from shared.bus.contract import LAST_HEADER
from tests.chaos.plan import Ask, Question
from tests.chaos.verdict import Answer

MODEL = "tiny"
CONNECT_LIMIT_S = 60.0
AGAIN_S = 0.1
NO_FRONTEND = "no_responders"
PING_S, LONE_PING_S = 2, 120
"""Seconds between two PINGs of a client that has another server to go to, and of one that has none."""


class HttpClients:
    """One `openai` client a frontend."""

    def __init__(self, urls: list[str], key: str, now: Callable[[], float], *, read_limit_s: float) -> None:
        self._now = now
        self.unready: set[int] = set()
        """Frontends that say so; who asks them all the time keeps it."""
        timeout = httpx2.Timeout(read_limit_s, connect=CONNECT_LIMIT_S)
        self._clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout) for url in urls]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def ask(self, question: Question, answer: Answer, *, only: bool = False) -> None:
        """Fills `answer` until it ends. `only`: at the frontend it names, or not at all."""
        first = answer.frontend
        order = [*range(first, len(self._clients)), *range(first)]
        for frontend in [first] if only else sorted(order, key=lambda one: one in self.unready):
            answer.frontend, answer.moved = frontend, frontend != first
            try:
                await self._ask(self._clients[frontend], question, answer)
                answer.heard_s = self._now()
                complete = answer.finish and answer.completion_tokens >= 0
                answer.end, answer.error = ("answered", "") if complete else ("broken", "the stream ended early")
                return
            except (APIConnectionError, httpx2.TransportError) as wrong:
                answer.end, answer.error = "broken", f"{wrong!r} from {wrong.__cause__!r}"
                answer.heard_s = self._now()
                if not isinstance(wrong.__cause__, httpx2.ConnectError):
                    return
            except APIError as wrong:
                answer.end, answer.error, answer.code = "failed", wrong.message, wrong.code or ""
                answer.heard_s = self._now()
                return

    async def _ask(self, client: AsyncOpenAI, question: Question, answer: Answer) -> None:
        chosen: dict[str, Any] = body(question, answer.ask)
        extra = {name: chosen.pop(name) for name in ("ignore_eos", "cache_salt") if name in chosen}
        create = client.chat.completions.create if question.chat else client.completions.create
        reply = await create(**chosen, extra_body=extra)
        if isinstance(reply, AsyncStream):
            async for chunk in reply:
                take(answer, chunk, self._now())
        else:
            take(answer, reply, self._now())


class NatsClient:
    """One connection, as many requests as one likes. Its own connection breaks when NATS ends: so do its requests."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext | None,
        namespace: str,
        key: str,
        now: Callable[[], float],
        *,
        silence_limit_s: float,
    ) -> None:
        """`url` has one server or several. A request that nothing is heard of for `silence_limit_s` is given up."""
        self._urls = url.split(",")
        self._tls = tls
        self._namespace = namespace
        self._headers = {"Authorization": f"Bearer {key}"}
        self._now = now
        self._silence_limit_s = silence_limit_s
        self._client = Client()
        self._connected = asyncio.Event()
        self._running: dict[str, tuple[Answer, asyncio.Event]] = {}
        """Inbox → the answer, and what is set when it has ended."""

    async def open(self) -> None:
        async def lost() -> None:
            self._connected.clear()
            for answer, ended in self._running.values():
                answer.end, answer.error, answer.heard_s = "broken", "the connection to NATS broke", self._now()
                ended.set()

        async def back() -> None:
            self._connected.set()

        async def error(_wrong: Exception) -> None:
            """Set by `lost` too."""

        await self._client.connect(
            self._urls,
            tls=self._tls,
            ping_interval=PING_S if len(self._urls) > 1 else LONE_PING_S,
            max_reconnect_attempts=-1,
            reconnect_time_wait=cast("int", AGAIN_S),  # it is only ever slept
            disconnected_cb=lost,
            reconnected_cb=back,
            error_cb=error,
        )
        self._connected.set()

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, question: Question, answer: Answer) -> None:
        """Fills `answer` until it ends; waits for a connection first, since nothing was asked yet."""
        await self._connected.wait()
        answer.asked_s = answer.heard_s = self._now()
        ended = asyncio.Event()
        inbox = self._client.new_inbox()
        self._running[inbox] = (answer, ended)

        async def receive(message: Msg) -> None:
            if answer.end is None:
                self._take(answer, message, ended)

        subject = subjects.client(self._namespace, "chat" if question.chat else "completions")
        payload = json.dumps(body(question, answer.ask)).encode()
        subscription: Subscription | None = None
        try:
            subscription = await self._client.subscribe(inbox, cb=receive)
            await self._client.publish(subject, payload, reply=inbox, headers=self._headers)
            while not ended.is_set():
                await self._wait(answer, ended)
                if answer.code == NO_FRONTEND and answer.asked_s + CONNECT_LIMIT_S > self._now():
                    answer.end, answer.code, answer.moved = None, "", True
                    ended.clear()
                    await asyncio.sleep(AGAIN_S)
                    await self._client.publish(subject, payload, reply=inbox, headers=self._headers)
        except (nats.errors.Error, OSError) as wrong:
            if answer.end is None:
                answer.end, answer.error, answer.heard_s = "broken", repr(wrong), self._now()
        finally:
            del self._running[inbox]
            if subscription is not None:
                with suppress(nats.errors.Error):  # it may have ended with its connection
                    await subscription.unsubscribe()

    async def _wait(self, answer: Answer, ended: asyncio.Event) -> None:
        left_s = answer.heard_s + self._silence_limit_s - self._now()
        try:
            async with asyncio.timeout(max(left_s, 0)):
                await ended.wait()
        except TimeoutError:
            if self._now() - answer.heard_s >= self._silence_limit_s:
                answer.end, answer.error = "silent", "nothing was heard"
                ended.set()

    def _take(self, answer: Answer, message: Msg, ended: asyncio.Event) -> None:
        headers: Mapping[str, str] = message.headers or {}
        answer.heard_s = self._now()
        if headers.get("Status") == "503":
            answer.end, answer.error, answer.code = "failed", "no frontend listens", NO_FRONTEND
        elif (failed := headers.get("Headrace-Status")) is not None:
            error = json.loads(message.data)["error"]
            answer.end, answer.error, answer.code = "failed", f"{failed}: {error['message']}", error["code"] or ""
        else:
            take(answer, msgspec.json.decode(message.data, type=_Piece), answer.heard_s)
            if LAST_HEADER not in headers:
                return
            complete = answer.finish and answer.completion_tokens >= 0
            answer.end, answer.error = ("answered", "") if complete else ("broken", "the stream ended early")
        ended.set()


def body(question: Question, ask: Ask) -> dict[str, Any]:
    """OpenAI's JSON."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": question.max_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        "frequency_penalty": question.frequency_penalty,
        "ignore_eos": question.ignore_eos,
        "stream": ask.streamed,
    }
    if ask.salt:
        fields["cache_salt"] = ask.salt
    if ask.streamed:
        fields["stream_options"] = {"include_usage": True}
    if question.chat:
        return fields | {"messages": [{"role": "user", "content": question.prompt}]}
    return fields | {"prompt": question.prompt}


# --- one JSON object of an answer, whole or a chunk, of either operation


class _Content(Struct):
    content: str | None = None


class _AnswerChoice(Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Content | None = None
    message: _Content | None = None


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int


class _Piece(Struct):
    choices: list[_AnswerChoice]
    usage: _Usage | None = None


def take(answer: Answer, piece: _Piece | ChatCompletion | ChatCompletionChunk | Completion, now_s: float) -> None:
    """Append one more piece to what the client has."""
    answer.heard_s = now_s
    for choice in piece.choices:
        said = getattr(choice, "delta", None) or getattr(choice, "message", None)
        answer.text += (said.content if said is not None else getattr(choice, "text", None)) or ""
        answer.finish = choice.finish_reason or answer.finish
    if piece.usage is not None:
        answer.prompt_tokens, answer.completion_tokens = piece.usage.prompt_tokens, piece.usage.completion_tokens
