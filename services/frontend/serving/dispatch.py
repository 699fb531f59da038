"""Sends each request to the operation that it asks for, whether it came over HTTP or NATS.

body ─▶ decode ─┬─▶ chat, completions: serving/chat.py
                ├─▶ responses: serving/responses.py, over serving/chat.py
                ├─▶ embeddings: serving/embeddings.py
                ├─▶ pictures, picture edits, videos: serving/pictures.py, serving/videos.py
                ├─▶ tokenize, detokenize: serving/tokenize.py
                └─▶ those of other providers' APIs: serving/foreign.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, assert_never

import msgspec

from services.frontend.models.model import ModelLimits
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.completions import decode_completion
from services.frontend.protocol.embeddings import decode_embeddings
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.operations import ForeignOperation, ModelEntry, ModelList, Operation
from services.frontend.protocol.pictures import decode_edit, decode_pictures
from services.frontend.protocol.videos import decode_video
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace
from services.frontend.requests.terms import DEADLINE_HEADER, lowest_allowed
from services.frontend.serving.chat import ServingChat, sampling_defaults
from services.frontend.serving.embeddings import ServingEmbeddings
from services.frontend.serving.foreign import ServingForeign
from services.frontend.serving.known_fields import OTHER, counted_name
from services.frontend.serving.pictures import PictureReply
from services.frontend.serving.prompts import key_pool
from services.frontend.serving.reply import ChatReply, EventReply, Opening
from services.frontend.serving.request_context import (
    SALT_HEADER,
    SESSION_HEADER,
    RequestContext,
    RequestId,
    header_salt,
    session_name,
)
from services.frontend.serving.response_directory import ResponseDirectory
from services.frontend.serving.responses import ServingResponses
from services.frontend.serving.tokenize import ServingTokenize
from services.frontend.serving.videos import ServingVideos, VideoEvents

Reply = ChatReply | EventReply | PictureReply | VideoEvents
"""A streamed answer while it is made."""

VideoOperation = Literal["list_videos", "retrieve_video", "delete_video", "cancel_video", "video_events"]

NAMES_COUNTED = 200
"""Names of ignored fields that the metric tells apart."""


class Dispatcher:
    """All operations, and the list of models."""

    def __init__(self, chat: ServingChat, directory: ResponseDirectory, videos: ServingVideos) -> None:
        self._config = chat.config
        self.access_log = chat.config.access_log
        """Whether requests that do not fail in the service have a line in the log, too."""
        self._ignored = chat.metrics.ignored_fields
        self._counted_names: set[str] = set()
        self._models = chat.models
        self._chat = chat
        self._responses = ServingResponses(chat, directory)
        self._embeddings = ServingEmbeddings(chat.service, chat.models, chat.pool)
        self._pictures = videos.pictures
        self.media = videos.pictures.media
        self.videos = videos
        self._making: asyncio.Task[None] | None = None
        self.foreign = ServingForeign(chat, self._embeddings)
        """The operations of other providers' APIs."""
        self._tokenize = ServingTokenize(chat.models, chat.service.limits, chat.image_sizes)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to hear of requests' steps, to remove files that expire, and to make videos."""
        tasks.create_task(self.media.run(), name="media")
        self._making = tasks.create_task(self.videos.run(), name="videos")
        await self._chat.service.start()

    def stop(self) -> None:
        """Leave this frontend's videos to others, or to the next one."""
        if self._making is not None:
            self._making.cancel()

    def context(
        self,
        id_: RequestId,
        permit: Permit,
        headers: Mapping[str, str],
        trace: RequestTrace | None = None,
        announce: Callable[[Opening], None] = lambda _: None,
    ) -> RequestContext:
        """Return the context of a request whose body is complete now. Raise InvalidRequest that names a header."""
        now = asyncio.get_running_loop().time()
        if trace is not None:
            trace.attributes["headrace.request_id"] = id_.unique
        ignored = IgnoredFields(refuse=self._config.unknown_fields == "refuse")
        return RequestContext(
            id_,
            permit,
            now,
            deadline_header=headers.get(DEADLINE_HEADER),
            session=session_name(headers.get(SESSION_HEADER)),
            salt_header=header_salt(headers.get(SALT_HEADER)),
            lowest_priority=lowest_allowed(permit.account, self._config.access.min_priority),
            trace=trace,
            ignored=ignored,
            announce=announce,
        )

    def answer(
        self, operation: Operation | ForeignOperation, body: bytes, context: RequestContext
    ) -> AbstractAsyncContextManager[Reply | bytes]:
        """Answer a request with a stream or one JSON object. Leaving the context cancels what still runs, and notes
        what it cost its key.

        Raise InvalidRequest, Overloaded, RateLimited, Unavailable and RequestTimeout, here or on entering the context.
        """
        ignored = context.ignored
        match operation:
            case "chat":
                return self._chat.answer(decode_chat(body, ignored), context)
            case "completions":
                return self._chat.answer(decode_completion(body, ignored), context)
            case "responses":
                return self._responses.create(body, context)
            case "retrieve_response":
                return _whole(self._responses.retrieve(body, context))
            case "delete_response":
                return _whole(self._responses.delete(body, context))
            case "embeddings":
                return _whole(self._embeddings.answer(decode_embeddings(body, ignored), context))
            case "pictures":
                return self._pictures.answer(decode_pictures(body, ignored), context)
            case "picture_edits":
                return self._pictures.answer(decode_edit(body, ignored), context)
            case "videos":
                return _whole(self.videos.create(decode_video(body, ignored), context))
            case "list_videos" | "retrieve_video" | "delete_video" | "cancel_video" | "video_events":
                return self._on_video(operation, body, context)
            case "tokenize" | "detokenize":
                pool = key_pool(self._chat.pool, context.permit)
                return _whole(self._tokenize.answer(operation, body, pool, context))
            case _:
                return self.foreign.answer(operation, body, context)

    def _on_video(
        self, operation: VideoOperation, body: bytes, context: RequestContext
    ) -> AbstractAsyncContextManager[Reply | bytes]:
        match operation:
            case "list_videos":
                return _whole(self.videos.list_page(body, context))
            case "retrieve_video":
                return _whole(self.videos.retrieve(body, context))
            case "delete_video":
                return _whole(self.videos.delete(body, context))
            case "cancel_video":
                return _whole(self.videos.cancel(body, context))
            case "video_events":
                return self.videos.events(body, context)
            case _:
                assert_never(operation)

    def count_ignored(self, names: Sequence[str]) -> None:
        """Count the ignored fields of a request that is answered."""
        for name in map(counted_name, names):
            if name != OTHER and len(self._counted_names) < NAMES_COUNTED:
                self._counted_names.add(name)
            self._ignored.labels(name if name in self._counted_names else OTHER).inc()

    def models(self) -> bytes:
        """Return the body of /v1/models."""
        models = [self._entry(name, name, None, limits) for name, limits in self._models.served().items()]
        loras = self._models.served_loras().items()
        models += [self._entry(name, model.lora, model.parent, limits) for name, (model, limits) in loras]
        return msgspec.json.encode(ModelList(models))

    def model(self, name: str) -> bytes:
        """Return the body of /v1/models/{name}. Raise InvalidRequest and Unavailable."""
        base = self._models.base_of(name)
        limits = self._models.served().get(base)
        if limits is not None and (limits.pictures is not None or self._models.text_of(name)):
            return msgspec.json.encode(self._entry(base, base, None, limits))
        model, limits = self._models.find(name)
        return msgspec.json.encode(self._entry(model.name, model.lora or model.name, model.parent or None, limits))

    def _entry(self, name: str, root: str, parent: str | None, limits: ModelLimits) -> ModelEntry:
        defaults = sampling_defaults(limits, self._config)
        return ModelEntry(name, _STARTED, limits.context_length, sampling_defaults=defaults, root=root, parent=parent)


_STARTED = int(time.time())


@asynccontextmanager
async def _whole(answer: Awaitable[bytes]) -> AsyncIterator[bytes]:
    yield await answer
