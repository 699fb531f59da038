"""Pictures, for /v1/images/generations from texts and for /v1/images/edits from images.

    PictureRequest ─▶ find the model ─▶ one Picture each ─┬▶ InferenceRequest ─▶ file ─┬▶ base64, or kept with a URL
                                                          └▶ …                          ┘

Each picture is a request of its own to routers and workers, as an input of embeddings is. So it is routed by itself,
and made again elsewhere if its worker is lost; its seed makes the same picture. If one fails for good, all do.

A picture has no tokens. Its steps stand for tokens: in the load of workers, in the limits, and in what a key pays.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.accounts import TokenUse
from services.frontend.media.store import MediaStore
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Output
from services.frontend.protocol.errors import Failure, field_error
from services.frontend.protocol.pictures import (
    CompletedEdit,
    CompletedPicture,
    MadePicture,
    PartialEdit,
    PartialPicture,
    PictureAnswer,
    PictureEditRequest,
    PictureRequest,
    PictureUsage,
    check_text,
    picture_of,
    strength_of,
)
from services.frontend.requests.admission import Permit
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import NOTHING, InferenceRequest, Stream
from services.frontend.requests.terms import RequestDeadline, deadline_of, served_priority
from services.frontend.serving.picture_edits import EditImages, images_of_edit
from services.frontend.serving.prompts import IMAGES_READ, until
from services.frontend.serving.reply import SILENCE, Chunk, Framing, Opening
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.responses_writer import KEEPALIVE
from shared.errors import HeadraceError, InvalidRequest, RequestTimeout
from shared.hashing import pack_tokens
from shared.messages.generate import Picture, Sampling

NO_TOKEN_BYTES = TokenBytes((), (), strip_first_space=False)
"""What turns the tokens of pictures into text: they have none."""
SEEDS = 1 << 32
"""Seeds that are drawn are less than it."""
COPIES = 4
"""How many bytes are held for each of a picture's file: its own, those of its base64, and those of the answer."""


def picture_request(
    name: str, model: str, picture: Picture, deadline: float, priority: int = 0, **others: object
) -> InferenceRequest:
    """Return the request of one picture to routers and workers; `others` are fields of it."""
    return InferenceRequest(
        id=name,
        model=model,
        prompt=pack_tokens([0] * picture.steps),
        prompt_tokens=picture.steps,
        hashes=b"",
        sampling=Sampling(max_tokens=1),
        salt="",
        affinity_key="",
        deadline=deadline,
        output=Output(NO_TOKEN_BYTES, ()),
        priority=priority,
        picture=picture,
        **others,  # type: ignore[arg-type]
    )


class ServingPictures(Struct, frozen=True):
    """Answers requests for pictures."""

    service: RequestService
    models: ModelRegistry
    media: MediaStore
    edits: EditImages
    draw: Random

    @asynccontextmanager
    async def answer(self, request: PictureRequest, context: RequestContext) -> AsyncIterator[PictureReply | bytes]:
        """Answer a request. Leaving the context cancels what still runs, and notes what it cost its key. Raise
        InvalidRequest, Overloaded, RateLimited, Unavailable and RequestTimeout."""
        now, permit = asyncio.get_running_loop().time(), context.permit
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        priority = served_priority(request.priority, context.lowest_priority)
        permit.model = self.models.base_of(request.model)
        name, output = self.models.pictures_of(request.model)
        if output.frames:
            raise field_error("model", f"{name!r} makes videos: ask for them at /v1/videos", "unsupported_value")
        strength, given = None, None
        if isinstance(request, PictureEditRequest):
            strength, given = strength_of(request, name, output), images_of_edit(request)
            self.edits.check(given)
        else:
            check_text(request, name, output)
        if request.response_format == "url":
            self.media.check("response_format")
        seed = self.draw.randrange(SEEDS) if request.seed is None else request.seed
        first, count = replace(picture_of(request, output, seed), strength=strength), request.n or 1
        if request.response_format == "url":
            await self.media.check_room([first] * count)
        if request.stream:
            context.announce(Opening("event"))
        payment = paid(permit, first.steps * count, count, now, deadline)
        if given is not None:  # a key without steps left has no image decoded
            first = await until(deadline.at, IMAGES_READ, self.edits.read(given, first, output.multiple, context))
        pictures = [replace(first, seed=first.seed + index) for index in range(count)]
        with payment:
            requests = [
                self._request(context, name, picture, index, deadline.at, priority)
                for index, picture in enumerate(pictures)
            ]
            if request.stream:
                with self.service.open(requests[0]) as stream:
                    yield PictureReply(stream, first, permit)
            else:
                files = await self._make(requests, permit)
                yield await self._answer(request, name, pictures, files, permit.key)

    def _request(
        self, context: RequestContext, model: str, picture: Picture, index: int, deadline: float, priority: int
    ) -> InferenceRequest:
        unique = context.id.unique
        return picture_request(
            f"{unique}/{index}" if index else unique,
            model,
            picture,
            deadline,
            priority,
            trace=context.trace,
            served=context.permit.served,
            is_follower=index > 0,  # not refused for waiting for the pictures before it
        )

    async def _make(self, requests: Sequence[InferenceRequest], permit: Permit) -> list[bytes]:
        """Make all pictures at the same time. Raise the error that ended one of them, and Overloaded."""
        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(self._file(request, permit), name=request.id) for request in requests]
        except* HeadraceError as wrong:
            raise wrong.exceptions[0] from None
        return [task.result() for task in made]

    async def _file(self, request: InferenceRequest, permit: Permit) -> bytes:
        """Return the file of a picture. Raise what ended it, and Overloaded."""
        with self.service.open(request) as stream:
            counted = 0
            async for _ in stream:
                counted = count_file(stream, counted, permit)
            return stream.take_file()[1]

    async def _answer(
        self, request: PictureRequest, model: str, pictures: Sequence[Picture], files: Sequence[bytes], key: str
    ) -> bytes:
        first = pictures[0]
        data: list[MadePicture] = []
        for picture, file in zip(pictures, files, strict=True):
            if request.response_format == "url":
                url = await self.media.keep(file, picture.format, key)
                data.append(MadePicture(url=url, seed=picture.seed))
            else:
                data.append(MadePicture(b64_json=await asyncio.to_thread(_text, file), seed=picture.seed))
        assert first.format != "mp4"
        answer = PictureAnswer(
            created=int(time.time()),
            data=data,
            model=model,
            size=f"{first.width}x{first.height}",
            output_format=first.format,
            usage=_usage(first.steps * len(pictures)),
        )
        return await asyncio.to_thread(msgspec.json.encode, answer)


class PictureReply(Struct):
    """A streamed picture while it is made; its methods are those of ChatReply."""

    stream: Stream
    picture: Picture
    permit: Permit

    @property
    def framing(self) -> Framing:
        """How chunks are framed over HTTP."""
        return "event"

    def keepalive_chunk(self) -> bytes:
        """Return an event that adds nothing to the answer."""
        return KEEPALIVE

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last event of an answer that failed after it had begun."""
        return failure.payload

    def wake(self) -> None:
        """Make `chunks` yield SILENCE if it waits for a step."""
        self.stream.wake()

    async def chunks(self, _send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the events. Raise the error that ended the request, and Overloaded."""
        index, step, picture, size = 0, 0, self.picture, f"{self.picture.width}x{self.picture.height}"
        counted = 0
        partial, completed = (PartialEdit, CompletedEdit) if picture.images else (PartialPicture, CompletedPicture)
        async for delta in self.stream:
            assert delta is NOTHING, "a picture has no text"
            counted = count_file(self.stream, counted, self.permit)
            preview, self.stream.preview = self.stream.preview, b""
            if not preview:
                if step == self.stream.step:  # no step has woken it, but a silence
                    yield Chunk(SILENCE)
                step = self.stream.step
                continue
            now = int(time.time())
            event = partial(b64_json=_text(preview), partial_image_index=index, created_at=now, size=size)
            yield Chunk(msgspec.json.encode(event))
            index += 1
        assert picture.format != "mp4"
        last = completed(
            b64_json=await asyncio.to_thread(_text, self.stream.take_file()[1]),
            created_at=int(time.time()),
            size=size,
            output_format=picture.format,
            seed=picture.seed,
            usage=_usage(picture.steps),
        )
        yield Chunk(msgspec.json.encode(last), more=True, last=True)


def count_file(stream: Stream, counted: int, permit: Permit) -> int:
    """Count what has come of a picture's file as bytes of its request, beyond the `counted` ones. Return how many bytes
    of it are counted now; an attempt that begins the file again gives none back. Raise Overloaded."""
    if (more := stream.file_bytes - counted) > 0:
        permit.add_bytes(COPIES * more)
        counted += more
    return counted


class paid:
    """A context in which pictures are made: their steps count against the limits, and their key pays for them. Entering
    raises Overloaded and RateLimited."""

    def __init__(self, permit: Permit, steps: int, count: int, now: float, deadline: RequestDeadline) -> None:
        self._permit = permit
        self._steps = steps
        self._deadline = deadline
        permit.check_least(steps, count, now)
        permit.add_tokens(steps, count)
        permit.charge(steps, now)

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, wrong: BaseException | None, _trace: object) -> None:
        # The same rule as for text before its first token.
        failed = isinstance(wrong, HeadraceError) and not isinstance(wrong, InvalidRequest)
        free = failed and not (self._deadline.shortened and isinstance(wrong, RequestTimeout))
        self._permit.spent = TokenUse(self._steps, 0, 0 if free else self._steps)


def _usage(steps: int) -> PictureUsage:
    return PictureUsage(output_tokens=steps, total_tokens=steps)


def _text(file: bytes) -> str:
    return b64encode(file).decode("ascii")
