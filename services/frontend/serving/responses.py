"""Responses, for /v1/responses: a chat whose answer is sent as items and events, and stored to be continued.

body ─▶ decode ─▶ the stored items and conversation ─▶ as_chat ─▶ ServingChat ─▶ ResponseWriter ─▶ store

A body becomes a chat, so what chats learn, responses know. Stored responses are in one frontend's memory, which their
id names: a database would be one more system to run, and a client can send its conversation again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.protocol import responses_request
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.decoding import BODY_LIMIT_BYTES
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import ignore, name_here, renaming
from services.frontend.protocol.messages import ChatMessage
from services.frontend.protocol.responses_events import Response, ResponseDeleted, new_response
from services.frontend.protocol.responses_items import (
    InputItem,
    ItemReference,
    decode_referenced,
    items_by_id,
    messages_of,
)
from services.frontend.protocol.text_plan import plan_of
from services.frontend.requests.terms import deadline_of
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.reply import EventReply, response_opening
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.response_directory import ResponseDirectory, item_name, response_of
from services.frontend.serving.response_store import StoredResponse
from services.frontend.serving.responses_writer import ResponseWriter
from shared.errors import MALFORMED, InvalidRequest, ProtocolError
from shared.messages.frontends import Forget, Recall, ResponseStoreRequest
from shared.messages.generate import Sampling

REFERENCED_RESPONSES = 256
"""The most responses whose items one input may refer to."""
RECALLED_BYTES = 8 << 20
"""The most bytes of these responses. Each comes as a whole, with the tools that it echoes."""
_MESSAGES = msgspec.json.Decoder(list[ChatMessage])


class ServingResponses(Struct, frozen=True):
    """Answers, returns and deletes responses."""

    chat: ServingChat
    directory: ResponseDirectory

    @asynccontextmanager
    async def create(self, body: bytes, context: RequestContext) -> AsyncIterator[EventReply | bytes]:
        """Answer a new response. Leaving the context cancels what still runs. Raise what `prepare` of ServingChat
        raises."""
        decoded = responses_request.decode_response(body, context.ignored)
        response_id, now = self.directory.response_id(context.id.unique), int(time.time())
        if streamed := bool(decoded.request.stream):
            known = new_response(decoded, response_id, now, decoded.request.model or "", Sampling(1))
            context.announce(response_opening(ResponseWriter(known, item_name(response_id), lambda *_: None)))
            del known
        decoded = await self._with_references(decoded, context)
        self._check_thinking(decoded, context)
        tools = decoded.tools
        table = decoded.names
        rename = partial(name_here, table=table)
        of_chat = replace(context, ignored=context.ignored.renamed(rename))
        request, conversation = await self._as_chat(decoded, of_chat)
        table = decoded.names_in(request.messages)

        def keep(response: Response, payload: bytes) -> None:
            if response.store:
                continued = _append(conversation, messages_of(response.output, tools.chat_names))
                self.directory.keep(StoredResponse(response_id, context.permit.key, continued, payload))

        with renaming(table):
            prepared = await self.chat.prepare(request, plan_of(request), of_chat)
            sampling = prepared.prompts[0][0].sampling
            response = new_response(decoded, response_id, now, prepared.model, sampling)
            del body, request, decoded  # the answer does not need them
            with self.chat.run(prepared, context) as choices:
                writer = ResponseWriter(response, item_name(response_id), keep, tools.called)
                reply = EventReply(writer, choices.streams[0], context.received_s)
                yield reply if streamed else await reply.full_body()

    async def retrieve(self, body: bytes, context: RequestContext) -> bytes:
        """Return a stored response as JSON. Raise InvalidRequest, Unavailable and RequestTimeout."""
        response_id = responses_request.decode_stored(body)
        return await self._ask_for(Recall(response_id, context.permit.key, "response"), context)

    async def delete(self, body: bytes, context: RequestContext) -> bytes:
        """Delete a response, and return the JSON answer. Raise InvalidRequest, Unavailable and RequestTimeout."""
        response_id = responses_request.decode_stored(body)
        await self._ask_for(Forget(response_id, context.permit.key), context)
        return msgspec.json.encode(ResponseDeleted(id=response_id))

    async def _as_chat(
        self, decoded: responses_request.DecodedRequest, context: RequestContext
    ) -> tuple[ChatRequest, bytes]:
        """Return the request as a chat, and the conversation up to the answer, as it is stored: a JSON list of
        messages, or empty if the response is not to be stored.

        Raise InvalidRequest, Unavailable and RequestTimeout.
        """
        former = await self._former(decoded, context)
        try:
            before = _MESSAGES.decode(former)
        except MALFORMED as strange:  # of a frontend of another version
            raise ProtocolError(f"the former conversation cannot be read: {strange}") from None
        chat = responses_request.as_chat(decoded, before, context.ignored)
        conversation = _append(former, messages_of(decoded.items, decoded.tools.chat_names))
        if len(conversation) > BODY_LIMIT_BYTES:
            param = "previous_response_id" if decoded.request.previous_response_id else "input"
            raise _too_large(param, "the whole conversation is", BODY_LIMIT_BYTES)
        return chat, conversation if decoded.is_stored else b""

    async def _with_references(
        self, decoded: responses_request.DecodedRequest, context: RequestContext
    ) -> responses_request.DecodedRequest:
        """Replace references to items of stored responses by these items. Raise InvalidRequest, Unavailable and
        RequestTimeout."""
        deadline = self._deadline(context, decoded.request.deadline_s)
        recalled: dict[str, dict[str, bytes]] = {}
        items: list[InputItem] = []
        size_bytes = recalled_bytes = 0
        for at, item in enumerate(decoded.items):
            if not isinstance(item, ItemReference):
                items.append(item)
                continue
            response_id = response_of(item.id)
            if response_id not in recalled:
                if len(recalled) == REFERENCED_RESPONSES:
                    raise field_error(f"input[{at}].id", f"references to more than {REFERENCED_RESPONSES} responses")
                found = await self.directory.ask(Recall(response_id, context.permit.key, "response"), deadline)
                found = found or b'{"output":[]}'
                recalled_bytes += len(found)
                if recalled_bytes > RECALLED_BYTES:
                    raise _too_large(f"input[{at}].id", "the responses that are referred to are", RECALLED_BYTES)
                context.permit.add_bytes(len(found))
                recalled[response_id] = _items(found)
                await asyncio.sleep(0)  # a response of this frontend comes without waiting
            raw = recalled[response_id].get(item.id)
            if raw is None:
                wrong = f"Item with id {item.id!r} not found."  # in OpenAI's words, and with its status
                raise InvalidRequest(wrong, param=f"input[{at}].id", code="item_not_found", status=404)
            size_bytes += len(raw)
            if size_bytes > BODY_LIMIT_BYTES:
                raise _too_large(f"input[{at}].id", "the items that are referred to are", BODY_LIMIT_BYTES)
            context.permit.add_bytes(len(raw))
            items.append(decode_referenced(raw, at))
        return replace(decoded, items=items)

    async def _former(self, decoded: responses_request.DecodedRequest, context: RequestContext) -> bytes:
        """Return the conversation that the request continues, as a JSON list of messages. Raise InvalidRequest,
        Unavailable and RequestTimeout."""
        previous = decoded.request.previous_response_id
        if previous is None:
            return b"[]"
        deadline = self._deadline(context, decoded.request.deadline_s)
        found = await self.directory.ask(Recall(previous, context.permit.key, "conversation"), deadline)
        if found is None:
            wrong = f"Previous response with id {previous!r} not found."  # in OpenAI's words, and with its status
            raise InvalidRequest(wrong, param="previous_response_id", code="previous_response_not_found")
        context.permit.add_bytes(len(found))
        return found

    async def _ask_for(self, question: ResponseStoreRequest, context: RequestContext) -> bytes:
        found = await self.directory.ask(question, self._deadline(context))
        if found is None:
            wrong = f"Response with id {question.response!r} not found."
            raise InvalidRequest(wrong, param="response_id", code="response_not_found", status=404)
        return found

    def _deadline(self, context: RequestContext, field: float | None = None) -> float:
        """Return the request's deadline on the loop's clock. Raise InvalidRequest."""
        return deadline_of(field, context.deadline_header, context.received_s, self.chat.service.limits).at

    def _check_thinking(self, decoded: responses_request.DecodedRequest, context: RequestContext) -> None:
        """Raise InvalidRequest if log-probabilities are asked for and the model thinks: which of its tokens belong to
        the message would be unknown. A summary of the thinking is ignored for a model that does not think."""
        summary, field = decoded.summary
        if not (decoded.wants_logprobs or summary):
            return
        model, _ = self.chat.models.find(decoded.request.model)
        if decoded.wants_logprobs and model.thinks:
            why = f"{responses_request.LOGPROBS!r} is not supported for {model.name!r}, which thinks"
            raise field_error("include", why, "unsupported_value")
        if summary and not model.thinks:
            ignore(field, context.ignored)


def _too_large(param: str, what: str, limit_bytes: int) -> InvalidRequest:
    return field_error(param, f"{what} longer than {limit_bytes} bytes", "request_too_large", status=413)


def _items(response: bytes) -> dict[str, bytes]:
    try:
        return items_by_id(response)
    except MALFORMED as strange:  # of a frontend of another version
        raise ProtocolError(f"a stored response cannot be read: {strange}") from None


def _append(conversation: bytes, messages: list[ChatMessage]) -> bytes:
    """Return a JSON list with messages appended."""
    more = msgspec.json.encode(messages)
    if not messages:
        return conversation
    return more if conversation == b"[]" else b"%b,%b" % (conversation[:-1], more[1:])
