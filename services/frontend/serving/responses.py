"""/v1/responses: a chat whose answer is told as items and events, and kept to be continued.

body ─▶ decode ─▶ former messages, from whoever keeps them ─▶ as_chat ─▶ Generation.open ─▶ ResponseWriter ─▶ keep
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import msgspec

from services.frontend.config import LimitsConfig
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.output import Delta
from services.frontend.protocol.chat import ChatMessage, ChatRequest
from services.frontend.protocol.decoding import BODY_LIMIT_BYTES
from services.frontend.protocol.errors import ErrorBody, Failure
from services.frontend.protocol.responses_events import Response, ResponseDeleted, ResponseError, new_response
from services.frontend.protocol.responses_items import messages_of
from services.frontend.protocol.responses_request import (
    DecodedRequest,
    as_chat,
    decode_response,
    decode_stored,
    with_response_names,
)
from services.frontend.requests.deadline import deadline_of
from services.frontend.requests.stream import Stream, join_deltas
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.reply import Chunk, Reply
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.response_directory import ResponseDirectory, ResponseKey
from services.frontend.serving.response_store import StoredResponse
from services.frontend.serving.responses_writer import ResponseWriter
from shared.errors import InvalidRequest, ProtocolError

_MESSAGES = msgspec.json.Decoder(list[ChatMessage])
_NOTHING = b'{"type":"keepalive"}'
"""As OpenAI's own streams have it: an event that its clients pass over."""


class ResponseReply:
    """One response's Reply."""

    typed_events = True

    def __init__(
        self, writer: ResponseWriter, stream: Stream, keep: Callable[[Response, bytes], None], *, streams: bool
    ) -> None:
        """`keep` is told of a response that has ended well, and its JSON, before its client is."""
        self.streamed = streams
        """Whether the client wants events."""
        self._writer = writer
        self._stream = stream
        self._keep = keep

    async def full_body(self) -> bytes:
        """The response. Raises what ended the request."""
        self._writer.push(join_deltas([delta async for delta in self._stream]))
        self._finish()
        payload = msgspec.json.encode(self._writer.response)
        self._keep(self._writer.response, payload)
        return payload

    def keepalive_chunk(self) -> bytes:
        """As in Reply."""
        return _NOTHING

    def error_chunk(self, wrong: Failure) -> bytes:
        """As in Reply."""
        code: Literal["rate_limit_exceeded", "server_error"]
        code = "rate_limit_exceeded" if wrong.status == 429 else "server_error"
        told = msgspec.json.decode(wrong.payload, type=ErrorBody).error
        return self._writer.fail(ResponseError(code, told.message))

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """As in Reply; the first events come with the first text."""
        writer, opened = self._writer, False
        async for delta in self._stream:
            events = writer.push(delta) if opened else [*writer.first_events(), *writer.push(delta)]
            opened = True
            for at, event in enumerate(events, 1):
                yield Chunk(event, more=at < len(events))
            if send is not None:
                self._stream.send_directly(_itself, partial(self._send_single, send))
        events = self._finish() if opened else [*writer.first_events(), *self._finish()]
        self._keep(writer.response, msgspec.json.encode(writer.response))
        for event in events[:-1]:
            yield Chunk(event, more=True)
        yield Chunk(events[-1], more=True, last=True)

    def _send_single(self, send: Callable[[bytes], bool], delta: Delta) -> bool:
        """Whether it is out; what does more than to continue an item goes the reader's way."""
        event = self._writer.continuation_event(delta)
        if event is None or not send(event):
            return False
        self._writer.continuation_sent(delta)
        return True

    def _finish(self) -> list[bytes]:
        stream = self._stream
        return self._writer.finish(stream.finish, stream.usage, stream.reasoning_tokens, int(time.time()))


def _itself(delta: Delta) -> Delta:
    return delta


class ServingResponses:
    """Answers such bodies."""

    def __init__(
        self, generation: ServingChat, models: ModelRegistry, desk: ResponseDirectory, limits: LimitsConfig
    ) -> None:
        self._generation = generation
        self._limits = limits
        self._models = models
        self._desk = desk

    @asynccontextmanager
    async def create(self, body: bytes, asking: RequestContext) -> AsyncIterator[Reply]:
        """Leaving it cancels what is still running. Raises as Generation.open does."""
        asked = decode_response(body)
        self._check_logprobs(asked)
        chat, conversation = await self._chat(asked, asking)
        response_id = self._desk.response_id(asking.id.unique)
        account = _account(asking)
        streams = bool(asked.request.stream)

        def keep(response: Response, payload: bytes) -> None:
            if response.store:
                said = _continued(conversation, messages_of(response.output))
                self._desk.keep(StoredResponse(response_id, account, said, payload))

        try:
            generating = self._generation.open(chat, asking)
            del body, chat  # nobody needs them while the answer streams
            async with generating as opened:
                response = new_response(asked, response_id, int(time.time()), opened.job.model)
                del asked
                writer = ResponseWriter(response, asking.id.unique)
                yield ResponseReply(writer, opened.stream, keep, streams=streams)
        except InvalidRequest as wrong:
            raise with_response_names(wrong) from None

    async def retrieve(self, body: bytes, asking: RequestContext) -> bytes:
        """JSON. Raises InvalidRequest, Unavailable and RequestTimeout."""
        response_id = decode_stored(body)
        found = await self._desk.find(ResponseKey(response_id, _account(asking)), "response", self._until(asking))
        if found is None:
            raise _not_found(response_id)
        return found

    async def delete(self, body: bytes, asking: RequestContext) -> bytes:
        """JSON. Raises InvalidRequest, Unavailable and RequestTimeout."""
        response_id = decode_stored(body)
        if not await self._desk.forget(ResponseKey(response_id, _account(asking)), self._until(asking)):
            raise _not_found(response_id)
        return msgspec.json.encode(ResponseDeleted(id=response_id))

    async def _chat(self, asked: DecodedRequest, asking: RequestContext) -> tuple[ChatRequest, bytes]:
        """What is asked for, and the conversation up to the answer as it is kept: a JSON list of messages, empty where
        it is not. Raises InvalidRequest, Unavailable and RequestTimeout."""
        former = await self._former(asked, asking)
        try:
            before = _MESSAGES.decode(former)
        except msgspec.MsgspecError as strange:  # of a frontend of another version
            raise ProtocolError(f"the former conversation cannot be read: {strange}") from None
        chat = as_chat(asked, before)
        conversation = _continued(former, messages_of(asked.items))
        if len(conversation) > BODY_LIMIT_BYTES:
            param = "previous_response_id" if asked.request.previous_response_id else "input"
            wrong = f"{param}: the whole conversation is longer than {BODY_LIMIT_BYTES} bytes"
            raise InvalidRequest(wrong, param=param, code="request_too_large", status=413)
        return chat, conversation if asked.is_stored else b""

    async def _former(self, asked: DecodedRequest, asking: RequestContext) -> bytes:
        """The conversation that goes on: a JSON list of messages. Raises InvalidRequest, Unavailable and
        RequestTimeout."""
        previous = asked.request.previous_response_id
        if previous is None:
            return b"[]"
        until = self._until(asking, asked.request.deadline_s)
        found = await self._desk.find(ResponseKey(previous, _account(asking)), "conversation", until)
        if found is None:
            raise InvalidRequest(  # in OpenAI's words, and with its status
                f"Previous response with id {previous!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        asking.permit.add_bytes(len(found))
        return found

    def _until(self, asking: RequestContext, field: float | None = None) -> float:
        """The request's deadline. Raises InvalidRequest."""
        return deadline_of(field, asking.deadline_header, asking.received_s, self._limits).at

    def _check_logprobs(self, asked: DecodedRequest) -> None:
        """Which tokens' text is the message's cannot be told where thinking comes before it. Raises InvalidRequest."""
        if asked.request.include:
            model, _ = self._models.find(asked.request.model)
            if model.thinks:
                wrong = f"include: {asked.request.include[0]!r} is not supported for {model.name!r}, which thinks"
                raise InvalidRequest(wrong, param="include", code="unsupported_value")


def _continued(conversation: bytes, messages: list[ChatMessage]) -> bytes:
    """A JSON list with more behind it."""
    more = msgspec.json.encode(messages)
    if not messages:
        return conversation
    return more if conversation == b"[]" else b"%b,%b" % (conversation[:-1], more[1:])


def _account(asking: RequestContext) -> str:
    account = asking.permit.account
    return "" if account is None else account.name


def _not_found(response_id: str) -> InvalidRequest:
    wrong = f"Response with id {response_id!r} not found."
    return InvalidRequest(wrong, param="response_id", code="response_not_found", status=404)
