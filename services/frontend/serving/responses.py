"""Responses, for /v1/responses: a chat whose answer is sent as items and events, and stored to be continued.

body ─▶ decode ─▶ the stored conversation ─▶ as_chat ─▶ ServingChat ─▶ ResponseWriter ─▶ store
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
_KEEPALIVE = b'{"type":"keepalive"}'
"""An event that OpenAI's own streams have too; its clients ignore it."""


class ResponseReply:
    """The reply of one response."""

    typed_events = True

    def __init__(
        self, writer: ResponseWriter, stream: Stream, keep: Callable[[Response, bytes], None], *, streamed: bool
    ) -> None:
        """Create it. `keep` gets a response that has ended well, and its JSON, before the client does."""
        self.streamed = streamed
        self._writer = writer
        self._stream = stream
        self._keep = keep

    async def full_body(self) -> bytes:
        """Return the response. Raises the error that ended the request."""
        self._writer.push(join_deltas([delta async for delta in self._stream]))
        self._finish()
        payload = msgspec.json.encode(self._writer.response)
        self._keep(self._writer.response, payload)
        return payload

    def keepalive_chunk(self) -> bytes:
        """Return an event that adds nothing to the response."""
        return _KEEPALIVE

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last event of a response that failed after it had begun."""
        code: Literal["rate_limit_exceeded", "server_error"]
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        error = msgspec.json.decode(failure.payload, type=ErrorBody).error
        return self._writer.fail(ResponseError(code, error.message))

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the events. The first ones come with the first text; `Reply.chunks` explains `send`."""
        writer, opened = self._writer, False
        async for delta in self._stream:
            events = writer.push(delta) if opened else [*writer.first_events(), *writer.push(delta)]
            opened = True
            for at, event in enumerate(events, 1):
                yield Chunk(event, more=at < len(events))
            if send is not None:
                self._stream.send_directly(_itself, partial(self._send_continuation, send))
        events = self._finish() if opened else [*writer.first_events(), *self._finish()]
        self._keep(writer.response, msgspec.json.encode(writer.response))
        for event in events[:-1]:
            yield Chunk(event, more=True)
        yield Chunk(events[-1], more=True, last=True)

    def _send_continuation(self, send: Callable[[bytes], bool], delta: Delta) -> bool:
        """Send a delta that only continues an item. Return whether it was sent; `chunks` yields others."""
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
    """Answers, returns and deletes responses."""

    def __init__(
        self, chat: ServingChat, models: ModelRegistry, directory: ResponseDirectory, limits: LimitsConfig
    ) -> None:
        self._chat = chat
        self._limits = limits
        self._models = models
        self._directory = directory

    @asynccontextmanager
    async def create(self, body: bytes, context: RequestContext) -> AsyncIterator[Reply]:
        """Answer a new response. Leaving the context cancels what still runs. Raises as `ServingChat.prepare` does."""
        decoded = decode_response(body)
        self._check_logprobs(decoded)
        request, conversation = await self._as_chat(decoded, context)
        response_id = self._directory.response_id(context.id.unique)
        account = _account(context)
        streamed = bool(decoded.request.stream)

        def keep(response: Response, payload: bytes) -> None:
            if response.store:
                continued = _append(conversation, messages_of(response.output))
                self._directory.keep(StoredResponse(response_id, account, continued, payload))

        try:
            prepared = await self._chat.prepare(request, context)
            response = new_response(decoded, response_id, int(time.time()), prepared.model)
            del body, request, decoded  # the answer does not need them
            async with self._chat.run(prepared, context) as choices:
                writer = ResponseWriter(response, context.id.unique)
                yield ResponseReply(writer, choices.streams[0], keep, streamed=streamed)
        except InvalidRequest as wrong:
            raise with_response_names(wrong) from None

    async def retrieve(self, body: bytes, context: RequestContext) -> bytes:
        """Return a stored response as JSON. Raises InvalidRequest, Unavailable and RequestTimeout."""
        response_id = decode_stored(body)
        found = await self._directory.find(
            ResponseKey(response_id, _account(context)), "response", self._deadline(context)
        )
        if found is None:
            raise _not_found(response_id)
        return found

    async def delete(self, body: bytes, context: RequestContext) -> bytes:
        """Delete a response, and return the JSON answer. Raises InvalidRequest, Unavailable and RequestTimeout."""
        response_id = decode_stored(body)
        if not await self._directory.forget(ResponseKey(response_id, _account(context)), self._deadline(context)):
            raise _not_found(response_id)
        return msgspec.json.encode(ResponseDeleted(id=response_id))

    async def _as_chat(self, decoded: DecodedRequest, context: RequestContext) -> tuple[ChatRequest, bytes]:
        """Return the request as a chat, and the conversation up to the answer, as it is stored: a JSON list of
        messages, or empty if the response is not to be stored.

        Raises InvalidRequest, Unavailable and RequestTimeout.
        """
        former = await self._former(decoded, context)
        try:
            before = _MESSAGES.decode(former)
        except msgspec.MsgspecError as strange:  # of a frontend of another version
            raise ProtocolError(f"the former conversation cannot be read: {strange}") from None
        chat = as_chat(decoded, before)
        conversation = _append(former, messages_of(decoded.items))
        if len(conversation) > BODY_LIMIT_BYTES:
            param = "previous_response_id" if decoded.request.previous_response_id else "input"
            wrong = f"{param}: the whole conversation is longer than {BODY_LIMIT_BYTES} bytes"
            raise InvalidRequest(wrong, param=param, code="request_too_large", status=413)
        return chat, conversation if decoded.is_stored else b""

    async def _former(self, decoded: DecodedRequest, context: RequestContext) -> bytes:
        """Return the conversation that the request continues, as a JSON list of messages. Raises InvalidRequest,
        Unavailable and RequestTimeout."""
        previous = decoded.request.previous_response_id
        if previous is None:
            return b"[]"
        deadline = self._deadline(context, decoded.request.deadline_s)
        found = await self._directory.find(ResponseKey(previous, _account(context)), "conversation", deadline)
        if found is None:
            raise InvalidRequest(  # in OpenAI's words, and with its status
                f"Previous response with id {previous!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        context.permit.add_bytes(len(found))
        return found

    def _deadline(self, context: RequestContext, field: float | None = None) -> float:
        """Return the request's deadline on the loop's clock. Raises InvalidRequest."""
        return deadline_of(field, context.deadline_header, context.received_s, self._limits).at

    def _check_logprobs(self, decoded: DecodedRequest) -> None:
        """Raise InvalidRequest if log-probabilities are asked for and the model thinks: which of its tokens belong to
        the message would be unknown."""
        if decoded.request.include:
            model, _ = self._models.find(decoded.request.model)
            if model.thinks:
                wrong = f"include: {decoded.request.include[0]!r} is not supported for {model.name!r}, which thinks"
                raise InvalidRequest(wrong, param="include", code="unsupported_value")


def _append(conversation: bytes, messages: list[ChatMessage]) -> bytes:
    """Return a JSON list with messages appended."""
    more = msgspec.json.encode(messages)
    if not messages:
        return conversation
    return more if conversation == b"[]" else b"%b,%b" % (conversation[:-1], more[1:])


def _account(context: RequestContext) -> str:
    account = context.permit.account
    return "" if account is None else account.name


def _not_found(response_id: str) -> InvalidRequest:
    wrong = f"Response with id {response_id!r} not found."
    return InvalidRequest(wrong, param="response_id", code="response_not_found", status=404)
