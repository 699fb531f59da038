"""The bodies of /v1/videos and their answers, as OpenAI has them, with fields of our own. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.frontend.protocol.chat import Priority
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.parts import ImageReference
from services.frontend.protocol.pictures import (
    FORM_LIMIT_BYTES,
    PROMPT_CHARACTERS,
    Guidance,
    ImageText,
    PictureSeed,
    PromptText,
    Size,
    Steps,
    check_guided,
    size_of,
    steps_of,
)
from shared.messages.cards import PictureEdit, PictureOutput
from shared.messages.generate import FRAMES_PER_S, Picture

VideoStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
LISTED = 20
"""The videos of a list that names no limit."""
SECONDS_CHARACTERS = 8
SecondsText = Annotated[str, Meta(max_length=SECONDS_CHARACTERS)]


class VideoRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/videos, as JSON or as a form."""

    prompt: PromptText
    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    seconds: SecondsText | None = None
    """The length in seconds, at 16 frames a second; the default is the model's."""
    size: Size | None = None
    """Width and height in pixels, such as 832x480; auto, the default, is the model's own."""
    # our own
    seed: PictureSeed | None = None
    """The seed. Without one it is drawn, and the answer says it."""
    steps: Steps | None = None
    """The number of denoising steps; the default is the model's."""
    guidance: Guidance | None = None
    """How closely the video follows the prompt; the default is the model's."""
    negative_prompt: Annotated[str, Meta(max_length=PROMPT_CHARACTERS)] | None = None
    """What the video must not show."""
    priority: Priority | None = None
    """Requests with a lower value are computed first. The default is 0; the API key bounds it."""
    input_reference: ImageText | ImageReference | None = None
    """The image that the video begins with, if the model takes one: a data URI, base64, a URL if the server fetches
    them, or in a form a file."""


class VideoError(Struct, frozen=True):
    """Why a video was not made."""

    code: str
    message: str


class Video(Struct, frozen=True, kw_only=True):
    """A video, while it is made and afterwards."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: VideoStatus
    progress: int
    """How much of it is done, in percent."""
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    """When its file is removed, in seconds since 1970. Null before it is complete."""
    prompt: str
    seconds: str
    size: str
    seed: int
    steps: int
    error: VideoError | None = None
    remixed_from_video_id: None = None


class VideoList(Struct, frozen=True, kw_only=True):
    """Videos of a key, newest first."""

    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class VideoDeleted(Struct, frozen=True):
    """A video is deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class VideoName(Struct, frozen=True, forbid_unknown_fields=True):
    """The video that a request is about."""

    video_id: Annotated[str, Meta(max_length=64)]


class VideoPage(Struct, frozen=True, forbid_unknown_fields=True):
    """Which videos to list."""

    limit: Annotated[str, Meta(pattern="^([1-9][0-9]?|100)$")] = str(LISTED)
    after: Annotated[str, Meta(max_length=64)] = ""
    """The id of the last video of the list before."""
    order: Literal["asc", "desc"] = "desc"


def decode_video(body: bytes, ignored: IgnoredFields = REFUSE) -> VideoRequest:
    """Decode and check the body of a request for a video. Raise InvalidRequest, naming the field."""
    return decode_body(VideoRequest, body, ignored, limit_bytes=FORM_LIMIT_BYTES)


def decode_name(body: bytes) -> str:
    """Return the id in the path of a request. Raise InvalidRequest."""
    return decode_body(VideoName, body).video_id


def decode_page(body: bytes) -> VideoPage:
    """Return what the query of a list asks for. Raise InvalidRequest, naming the parameter."""
    return decode_body(VideoPage, body)


def video_of(request: VideoRequest, output: PictureOutput, seed: int) -> Picture:
    """Return the video that a request means, without its image. Raise InvalidRequest."""
    takes: PictureOutput | PictureEdit = output
    if request.input_reference is not None:
        if output.edit is None:
            raise field_error("input_reference", f"{output.pipeline} takes none", "unsupported_value")
        takes = output.edit
    elif not output.texts:
        raise field_error("input_reference", f"{output.pipeline} makes videos from an image alone: send one")
    check_guided(request.guidance, request.negative_prompt, takes, output.pipeline)
    width, height = size_of(request.size, output)
    return Picture(
        request.prompt,
        width,
        height,
        steps_of(request.steps, output),
        seed,
        negative=request.negative_prompt or "",
        guidance=request.guidance,
        frames=frames_of(request.seconds, output),
        format="mp4",
    )


def frames_of(seconds: str | None, output: PictureOutput) -> int:
    """Return the number of frames of a length: one more than a multiple of what the model has. Raise InvalidRequest."""
    if seconds is None:
        return output.frames
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", seconds) or float(seconds) <= 0:
        raise field_error("seconds", f"{seconds!r} is not a number of seconds above 0, such as 4")
    frames = max(1, round(float(seconds) * FRAMES_PER_S / output.frame_multiple) * output.frame_multiple + 1)
    if frames > output.most_frames:
        most = f"{output.most_frames} frames, the most of this model (worker.diffusers.most_frames)"
        raise field_error("seconds", f"{seconds} s are {frames} frames at {FRAMES_PER_S} a second, more than {most}")
    return frames
