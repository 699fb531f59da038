"""Other providers' APIs, Anthropic's and Ollama's, in front of the operations for chats, completions and embeddings.

body ─▶ decode_body ─▶ as_chat ─▶ ServingChat ─▶ stream ─▶ a writer of that API ─▶ EventReply

A body becomes a chat, so admission, keys, grammars and migration are the chat's. Hints that have no effect are counted
and named; what would change the answer is refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, assert_never

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.anthropic import request as anthropic
from services.frontend.anthropic import writer as anthropic_writer
from services.frontend.anthropic.writer import MessageWriter
from services.frontend.ollama import answers as ollama_answers
from services.frontend.ollama import request as ollama
from services.frontend.ollama.answers import OllamaWriter
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.errors import Failure
from services.frontend.protocol.foreign import Names, ThinkingSupport, name_here, renaming, review
from services.frontend.protocol.operations import FOREIGN_PATHS, PATHS, ForeignOperation
from services.frontend.protocol.text_plan import TextRequest, plan_of
from services.frontend.requests.terms import allowed_s
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.embeddings import ServingEmbeddings
from services.frontend.serving.prompts import KNOWN, until
from services.frontend.serving.reply import EventReply, message_of, opening_of
from services.frontend.serving.request_context import RequestContext

EVENT_STREAM, LINES = "text/event-stream", "application/x-ndjson"
STREAMS = (EVENT_STREAM, LINES)
"""The types of content of streams: server-sent events, and lines as Ollama sends them."""
Generating = AbstractAsyncContextManager[EventReply | bytes]
"""An answer that is generated while the context is open, or one that is complete."""


class ServingForeign(Struct, frozen=True):
    """Answers the operations of other providers' APIs."""

    chat: ServingChat
    embeddings: ServingEmbeddings

    @asynccontextmanager
    async def answer(
        self, operation: ForeignOperation, body: bytes, context: RequestContext
    ) -> AsyncIterator[EventReply | bytes]:
        """Answer a request. Leaving the context cancels what still runs. Raise as `ServingChat.prepare` does."""
        allowed = allowed_s(None, context.deadline_header, self.chat.service.limits)  # also where nothing takes long
        deadline = context.received_s + allowed
        match operation:
            case "messages" | "ollama_chat" | "ollama_generate":
                if operation == "messages":
                    generating = await self._message(body, context, deadline)
                else:
                    generating = await self._ollama(operation == "ollama_chat", body, context, deadline)
                del body  # the answer does not need it
                async with generating as reply:
                    yield reply
            case "count_tokens":
                counting = decode_body(anthropic.CountTokensRequest, body, context.ignored)
                await until(deadline, KNOWN, self.chat.models.wait_expected(counting.model))
                counted, table = self.as_chat(counting, context)
                with renaming(table):
                    yield msgspec.json.encode({"input_tokens": await self.chat.count_prompt(counted, context)})
            case "ollama_embed":
                yield await self._embed(body, context)
            case "ollama_show":
                asked = decode_body(ollama.OllamaShowRequest, body, context.ignored)
                review(asked, context.ignored)
                yield ollama_answers.shown(*self.chat.models.find(ollama.served_name(asked.asked)))
            case _:
                assert_never(operation)

    def pages(self) -> Mapping[str, Callable[[], str | bytes]]:
        """Return what Ollama's paths without a body answer: a text or JSON."""
        version = msgspec.json.encode({"version": ollama_answers.API_VERSION})
        lists = dict.fromkeys(("/api/tags", "/api/ps"), self._listed)
        return {"/": lambda: "Ollama is running", "/api/version": lambda: version, **lists}

    def _listed(self) -> bytes:
        models = self.chat.models
        named = [name for name in models.served() if not models.text_of(name)]
        found = [*map(models.find, named), *models.served_loras().values()]
        return msgspec.json.encode({"models": [ollama_answers.listed(*each) for each in found]})

    async def _message(self, body: bytes, context: RequestContext, deadline: float) -> Generating:
        request = decode_body(anthropic.MessagesRequest, body, context.ignored)
        await until(deadline, KNOWN, self.chat.models.wait_expected(request.model))
        writer = MessageWriter(f"msg_{context.id.unique}", request.model)
        asked, table = self.as_chat(request, context)
        return self._generate(asked, writer, context, table)

    async def _ollama(self, is_chat: bool, body: bytes, context: RequestContext, deadline: float) -> Generating:
        request: ollama.OllamaChatRequest | ollama.OllamaGenerateRequest = (
            decode_body(ollama.OllamaChatRequest, body, context.ignored)
            if is_chat
            else decode_body(ollama.OllamaGenerateRequest, body, context.ignored)
        )
        await until(deadline, KNOWN, self.chat.models.wait_expected(ollama.served_name(request.model)))
        tools = isinstance(request, ollama.OllamaChatRequest) and bool(request.tools)
        support = self._support(ollama.served_name(request.model), tools=tools)
        writer = OllamaWriter(request.model, is_chat=is_chat)
        if not ollama.generates(request):
            review(request, context.ignored)
            return nullcontext(writer.loaded("unload" if ollama.unloads(request) else "load"))
        return self._generate(ollama.as_chat(request, support, context.ignored), writer, context, ollama.NAMES)

    @asynccontextmanager
    async def _generate(
        self, chat: TextRequest, writer: MessageWriter | OllamaWriter, context: RequestContext, table: Names
    ) -> AsyncIterator[EventReply | bytes]:
        with renaming(table):
            plan = plan_of(chat)
            if plan.streamed:
                context.announce(opening_of(writer))
            of_chat = replace(context, ignored=context.ignored.renamed(partial(name_here, table=table)))
            prepared = await self.chat.prepare(chat, plan, of_chat, default_tokens=None)
            del chat
            with self.chat.run(prepared, context) as choices:
                reply = EventReply(writer, choices.streams[0], context.received_s)
                yield reply if plan.streamed else await reply.full_body()

    def as_chat(self, request: anthropic.CountTokensRequest, context: RequestContext) -> tuple[ChatRequest, Names]:
        """Return a message as a chat, and the names of a chat's fields in it. Raise InvalidRequest and Unavailable."""
        support = self._support(request.model, tools=bool(request.tools))
        return anthropic.as_chat(request, support, context.ignored)

    async def _embed(self, body: bytes, context: RequestContext) -> bytes:
        request = decode_body(ollama.OllamaEmbedRequest, body, context.ignored)
        review(request, context.ignored)

        def ending(tokens: int) -> dict[str, Any]:
            return ollama_answers.embedded(request.model, tokens, time.monotonic() - context.received_s)

        return await self.embeddings.answer(ollama.as_embedding(request), context, ending)

    def _support(self, name: str, *, tools: bool) -> ThinkingSupport:
        """Return what a model's template shows about thinking. Raise InvalidRequest and Unavailable."""
        model, _ = self.chat.models.find(name)
        template = model.tool_template if tools else model.template
        return ThinkingSupport(model.thinks, () if template is None else template.reads)


def foreign_error(path: str, status: int, payload: bytes) -> bytes:
    """Return a failure in OpenAI's form in that of the API that the path belongs to."""
    if path.startswith(FOREIGN_PATHS["messages"]):
        return anthropic_writer.error_body(status, message_of(payload))
    return ollama_answers.error_body(message_of(payload)) if path.startswith("/api/") else payload


def last_event(path: str, kind: str, wrong: Failure) -> bytes | None:
    """Return the end of a stream of another server that broke off, as a client of the API that the path belongs to
    expects it. None if nothing can follow content of this type."""
    payload = foreign_error(path, wrong.status, wrong.payload)
    if kind == LINES and path.startswith("/api/"):
        return payload + b"\n"
    if kind != EVENT_STREAM:
        return None
    if path == PATHS["responses"]:
        error = msgspec.json.decode(payload)["error"]  # OpenAI's clients look for this field in any event
        payload = msgspec.json.encode({**error, "type": "error", "error": error})
    named = b"event: error\n" if path in (PATHS["responses"], FOREIGN_PATHS["messages"]) else b""
    return b"%bdata: %b\n\n" % (named, payload)
