"""Stores responses and finds them again, whichever frontend stores them: an id names that frontend.

    resp_{frontend}.{request}   this frontend's ──▶ its store     another's ──▶ Recall, Forget ──▶ that one's store
    {kind}_{frontend}.{request}-{number}    an item of that response

The same checks hold for both: a response must be stored, and belong to the account that asks. The responses of a
frontend that has ended are lost: no frontend answers for their ids, and they are unknown.
"""

from __future__ import annotations

import asyncio
from typing import assert_never

from services.frontend.config import ResponsesConfig
from services.frontend.metrics import Metrics
from services.frontend.serving.response_store import ResponseStore, StoredResponse
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message
from shared.errors import NoResponders, RequestTimeout, Unavailable
from shared.messages.frontends import RECALLED, RESPONSE_STORE_REQUEST, Forget, Recall, Recalled, ResponseStoreRequest
from shared.runtime.runtime import Runtime

PREFIX = "resp_"
PIECE_BYTES = 512 << 10
"""The size of one message between frontends: half of what NATS accepts by default."""
PEER_TIMEOUT_S = 2.0
"""Seconds to wait for each message of another frontend."""
PEER_LIMIT_S = 10.0
"""Seconds to wait for all of another frontend's answer, within the request's own deadline."""
EXPIRE_EVERY_S = 30.0
"""Seconds between two removals of old responses."""


def item_name(response_id: str) -> str:
    """Return what the ids of a response's items have between their kind and their number."""
    return response_id.removeprefix(PREFIX)


def response_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to; of an id that is not ours, one that is unknown."""
    _, _, name = item_id.partition("_")
    return PREFIX + name.rpartition("-")[0]


class ResponseDirectory:
    """The responses that this frontend can find, in its own store and in those of others."""

    def __init__(self, runtime: Runtime, config: ResponsesConfig, metrics: Metrics) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._store = ResponseStore(
            config.kept, config.kept_bytes, config.kept_s, lambda why: metrics.dropped_responses.labels(why).inc()
        )

    async def start(self) -> None:
        """Answer other frontends, and remove old responses regularly."""
        runtime = self._runtime
        await runtime.bus.subscribe(subjects.response_store(runtime.namespace, runtime.instance), self._on_question)
        runtime.tasks.create_task(self._expire(), name="forget old responses")

    def response_id(self, request: str) -> str:
        """Return the id of a request's response."""
        return f"{PREFIX}{self._runtime.instance}.{request}"

    def keep(self, kept: StoredResponse) -> None:
        """Store a response."""
        self._store.keep(kept, self._now())
        self._count()

    async def ask(self, question: ResponseStoreRequest, deadline: float) -> bytes | None:
        """Recall or forget a response, whichever frontend stores it. Return its JSON, empty for Forget; None if it is
        not stored, or belongs to another account. `deadline` is on the loop's clock. Raise Unavailable and
        RequestTimeout."""
        frontend, dot, _ = question.response.removeprefix(PREFIX).partition(".")
        if not (question.response.startswith(PREFIX) and dot and subjects.is_id(frontend)):
            return None
        if frontend == self._runtime.instance:
            return self._answer(question)
        subject = subjects.response_store(self._runtime.namespace, frontend)
        asking = self._runtime.bus.stream(
            subject, RESPONSE_STORE_REQUEST.encode(question), idle_timeout_s=PEER_TIMEOUT_S
        )
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout_at(min(deadline, self._now() + PEER_LIMIT_S)), asking as messages:
                async for message in messages:
                    recalled = RECALLED.decode(message.payload)
                    if not recalled.found:
                        return None
                    pieces.append(recalled.piece)
        except NoResponders:
            return None
        except (RequestTimeout, TimeoutError):
            if self._now() >= deadline:
                late = "the request's deadline passed before the frontend that stores this response answered"
                raise RequestTimeout(late) from None
            raise Unavailable("the frontend that stores this response does not answer") from None
        return b"".join(pieces)

    def _answer(self, question: ResponseStoreRequest) -> bytes | None:
        """Answer a question from the store of this frontend."""
        match question:
            case Recall():
                kept = self._store.find(question.response, question.account, self._now())
                found = None if kept is None else getattr(kept, question.what)
            case Forget():
                found = b"" if self._store.forget(question.response, question.account, self._now()) else None
            case _:
                assert_never(question)
        self._count()
        return found

    async def _on_question(self, message: Message) -> None:
        found = self._answer(RESPONSE_STORE_REQUEST.decode(message.payload))
        pieces = [b""] if not found else [found[at : at + PIECE_BYTES] for at in range(0, len(found), PIECE_BYTES)]
        for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            headers = {} if left else {LAST_HEADER: "true"}
            await self._runtime.bus.publish(
                message.reply, RECALLED.encode(Recalled(found is not None, piece)), headers=headers
            )

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._store.expire(self._now())
            self._count()

    def _count(self) -> None:
        self._metrics.kept_responses.set(len(self._store))
        self._metrics.kept_response_bytes.set(self._store.size_bytes)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
