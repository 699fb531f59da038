"""Sends each request to the operation that it asks for, whether it came over HTTP or NATS.

body ─▶ decode ─┬─▶ chat, completions: serving/chat.py
                ├─▶ responses: serving/responses.py, over serving/chat.py
                ├─▶ embeddings: serving/embeddings.py
                └─▶ tokenize, detokenize: serving/tokenize.py
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import assert_never

import msgspec

from services.frontend.metrics import Metrics
from services.frontend.models.registry import ModelRegistry
from services.frontend.protocol import chat
from services.frontend.protocol.completions import decode_completion
from services.frontend.protocol.embeddings import decode_embeddings
from services.frontend.protocol.model_list import ModelEntry, ModelList
from services.frontend.protocol.operations import Operation
from services.frontend.requests.service import RequestService
from services.frontend.serving.chat import ServingChat
from services.frontend.serving.embeddings import ServingEmbeddings
from services.frontend.serving.reply import JsonReply, Reply
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.response_directory import ResponseDirectory
from services.frontend.serving.responses import ServingResponses
from services.frontend.serving.tokenize import ServingTokenize
from services.frontend.structured.compiler import GrammarCompiler


class Dispatcher:
    """All operations, and the list of models."""

    def __init__(
        self,
        service: RequestService,
        models: ModelRegistry,
        pool: Executor,
        metrics: Metrics,
        grammars: GrammarCompiler,
        directory: ResponseDirectory,
    ) -> None:
        self._models = models
        self._chat = ServingChat(service, models, pool, metrics, grammars)
        self._responses = ServingResponses(self._chat, models, directory, service.limits)
        self._embeddings = ServingEmbeddings(service, models, pool)
        self._tokenize = ServingTokenize(models, pool, service.limits)

    @asynccontextmanager
    async def answer(self, operation: Operation, body: bytes, context: RequestContext) -> AsyncIterator[Reply]:
        """Answer a request. Leaving the context cancels what still runs, and notes what it cost its key.

        Raises InvalidRequest, Overloaded, RateLimited, Unavailable and RequestTimeout.
        """
        match operation:
            case "chat" | "completions":
                request = chat.decode_chat(body) if operation == "chat" else decode_completion(body)
                generating = self._chat.answer(request, context)
                del body, request  # the answer does not need them
                async with generating as reply:
                    yield reply
            case "responses":
                responding = self._responses.create(body, context)
                del body
                async with responding as reply:
                    yield reply
            case "retrieve_response":
                yield JsonReply(await self._responses.retrieve(body, context))
            case "delete_response":
                yield JsonReply(await self._responses.delete(body, context))
            case "embeddings":
                embedding = self._embeddings.answer(decode_embeddings(body), context)
                del body
                yield JsonReply(await embedding)
            case "tokenize" | "detokenize":
                yield JsonReply(await self._tokenize.answer(operation, body, deadline_header=context.deadline_header))
            case _:
                assert_never(operation)

    def models(self) -> bytes:
        """Return the body of /v1/models."""
        served = self._models.served().items()
        return msgspec.json.encode(ModelList([ModelEntry(name, _STARTED, one.context_length) for name, one in served]))

    def model(self, name: str) -> bytes:
        """Return the body of /v1/models/{name}. Raises InvalidRequest and Unavailable."""
        _, limits = self._models.find(name)
        return msgspec.json.encode(ModelEntry(name, _STARTED, limits.context_length))


_STARTED = int(time.time())
