"""The bodies of /v1/images/generations and /v1/images/edits and their answer, as OpenAI has them, with fields of our
own. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat import Priority, Seconds
from services.frontend.protocol.decoding import BODY_LIMIT_BYTES, Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.parts import ImageReference, Unread
from shared.messages.cards import PictureEdit, PictureOutput
from shared.messages.generate import Picture

PROMPT_CHARACTERS = 32_000
PICTURES_LIMIT = 10
"""OpenAI's limit of pictures in one request."""
EDIT_IMAGES_LIMIT = 16
"""OpenAI's limit of images that pictures are made from."""
SIZE_CHARACTERS = 16
MOST_SIDE = 16_383
"""Most pixels of a side: WebP files have no longer ones, and JPEG's end at 65,500."""
FORM_LIMIT_BYTES = 2 * BODY_LIMIT_BYTES
"""Most bytes of the JSON that a form with images means: base64 is longer by a third."""
MOST_SEED = (1 << 63) - 1

PromptText = Annotated[str, Meta(min_length=1, max_length=PROMPT_CHARACTERS)]
Size = Annotated[str, Meta(max_length=SIZE_CHARACTERS, extra_json_schema={"pattern": "^(auto|[0-9]+x[0-9]+)$"})]
PictureSeed = Annotated[int, Meta(ge=0, le=MOST_SEED)]
Steps = Annotated[int, Meta(ge=1, le=1000)]
Guidance = Annotated[float, Meta(ge=0, le=100)]
Strength = Annotated[float, Meta(gt=0, le=1)]
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


class PictureRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/images/generations."""

    prompt: PromptText
    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    n: Annotated[int, Meta(ge=1, le=PICTURES_LIMIT)] | None = None
    """How many pictures to make (1). Each has the seed after the one before it."""
    size: Size | None = None
    """Width and height in pixels, such as 1024x1024; auto, the default, is the model's own."""
    response_format: Literal["b64_json", "url"] | None = None
    """How pictures are returned: as base64 (the default), or as a URL, if the server keeps files."""
    output_format: Literal["png", "jpeg", "webp"] | None = None
    """The format of the files (png)."""
    stream: bool | None = None
    """Whether to return events: pictures that are not complete, and then the picture."""
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    """How many unfinished pictures a stream has (0)."""
    # our own
    seed: PictureSeed | None = None
    """The seed of the first picture. Without one it is drawn, and the answer says it."""
    steps: Steps | None = None
    """The number of denoising steps; the default is the model's."""
    guidance: Guidance | None = None
    """How closely pictures follow the prompt; the default is the model's."""
    negative_prompt: Annotated[str, Meta(max_length=PROMPT_CHARACTERS)] | None = None
    """What pictures must not show."""
    priority: Priority | None = None
    """Requests with a lower value are computed first. The default is 0; the API key bounds it."""
    deadline_s: Seconds | None = None
    """Seconds that the request may take; the server has a limit."""
    # advice, and what is not built
    quality: Annotated[str | None, Advisory()] = None
    style: Annotated[str | None, Advisory()] = None
    moderation: Annotated[str | None, Advisory()] = None
    output_compression: Annotated[int | None, Advisory()] = None
    background: Annotated[NotBuilt, Harmless("auto", "opaque")] = None
    user: Unread | UnsetType = UNSET


ImageText = Annotated[str, Meta(min_length=1)]


class PictureEditRequest(PictureRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/images/edits, as JSON or as a form."""

    image: ImageText | Annotated[list[ImageText], Meta(min_length=1, max_length=EDIT_IMAGES_LIMIT)] | UnsetType = UNSET
    """The image to make pictures from: a data URI, base64, a URL if the server fetches them, or in a form a file;
    several, if the model takes them."""
    images: Annotated[list[ImageReference], Meta(min_length=1, max_length=EDIT_IMAGES_LIMIT)] | UnsetType = UNSET
    """What `image` is, as OpenAI writes it in JSON. One of the two is needed."""
    mask: ImageText | ImageReference | None = None
    """Where the image is changed, if the model takes a mask: where it is transparent, or white if nothing is."""
    strength: Strength | None = None
    """How much of the image is changed, up to 1 for all; the default is the model's."""
    input_fidelity: Annotated[str | None, Advisory()] = None

    @property
    def given(self) -> Sequence[ImageText | ImageReference]:
        """The images, from either field, also if it is one."""
        if isinstance(self.image, str):
            return [self.image]
        return (self.images or ()) if isinstance(self.image, UnsetType) else self.image


class MadePicture(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A picture of an answer: its file, or where that is."""

    b64_json: str | UnsetType = UNSET
    """The file in base64, unless a URL was requested."""
    url: str | UnsetType = UNSET
    """Where the file is, for some time, if a URL was requested."""
    seed: int
    """The seed that makes this picture again."""


class PictureUsageDetails(Struct, frozen=True):
    """The tokens of the prompt, which are not counted here."""

    text_tokens: int = 0
    image_tokens: int = 0


class PictureUsage(Struct, frozen=True):
    """What the pictures cost. A token is a denoising step of one picture."""

    output_tokens: int
    total_tokens: int
    input_tokens: int = 0
    input_tokens_details: PictureUsageDetails = PictureUsageDetails()


class PictureAnswer(Struct, frozen=True, kw_only=True):
    """The answer of both."""

    created: int
    data: list[MadePicture]
    model: str
    size: str
    """Width and height in pixels."""
    output_format: Literal["png", "jpeg", "webp"]
    usage: PictureUsage


class PartialPicture(Struct, frozen=True, kw_only=True, tag="image_generation.partial_image"):
    """The event of an unfinished picture, which is small."""

    b64_json: str
    """A JPEG in base64."""
    partial_image_index: int
    created_at: int
    size: str
    """Width and height of the picture that is being made, in pixels."""
    output_format: Literal["jpeg"] = "jpeg"
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class PartialEdit(PartialPicture, frozen=True, kw_only=True, tag="image_edit.partial_image"):
    """The event of an unfinished picture that is made from images."""


class CompletedPicture(Struct, frozen=True, kw_only=True, tag="image_generation.completed"):
    """The last event: the picture."""

    b64_json: str
    created_at: int
    size: str
    output_format: Literal["png", "jpeg", "webp"]
    seed: int
    usage: PictureUsage
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class CompletedEdit(CompletedPicture, frozen=True, kw_only=True, tag="image_edit.completed"):
    """The last event of a picture that is made from images."""


R = TypeVar("R", bound=PictureRequest)


def decode_pictures(body: bytes, ignored: IgnoredFields = REFUSE) -> PictureRequest:
    """Decode and check the body of a request for pictures. Raise InvalidRequest, naming the field."""
    return _checked(decode_body(PictureRequest, body, ignored), ignored)


def decode_edit(body: bytes, ignored: IgnoredFields = REFUSE) -> PictureEditRequest:
    """Decode and check the body of a request for pictures from images. Raise InvalidRequest, naming the field."""
    request = _checked(decode_body(PictureEditRequest, body, ignored, limit_bytes=FORM_LIMIT_BYTES), ignored)
    if (request.image is UNSET) == (request.images is UNSET):
        raise field_error("image", "needed: either `image` or `images`")
    return request


def _checked(request: R, ignored: IgnoredFields) -> R:
    check_not_built(request, "", ignored)
    if request.stream and (request.n or 1) > 1:
        raise field_error("n", "a stream has one picture; leave n out, or stream", "unsupported_value")
    if request.stream and request.response_format == "url":
        raise field_error("response_format", "a stream has its picture as b64_json", "unsupported_value")
    if (request.seed or 0) + (request.n or 1) - 1 > MOST_SEED:
        raise field_error("seed", f"the last of {request.n} pictures would have a seed above {MOST_SEED}")
    if request.partial_images and not request.stream:
        raise field_error("partial_images", "only allowed with stream: true")
    return request


def size_of(size: str | None, output: PictureOutput) -> tuple[int, int]:
    """Return the width and height that a request means. Raise InvalidRequest."""
    if size is None or size == "auto":
        return output.width, output.height
    match = _SIZE.fullmatch(size)
    if match is None:
        raise field_error("size", f"{size!r} is neither auto nor WIDTHxHEIGHT, such as {output.width}x{output.height}")
    width, height = int(match[1]), int(match[2])
    if max(width, height) > MOST_SIDE:
        raise field_error("size", f"{size}: a side has at most {MOST_SIDE} pixels")
    if width % output.multiple or height % output.multiple:
        raise field_error("size", f"{size}: width and height must be multiples of {output.multiple} for this model")
    if width * height > output.most_pixels:
        most = f"{output.most_pixels} pixels, the most of this model (worker.diffusers.most_pixels)"
        raise field_error("size", f"{size}: {width * height} pixels are more than {most}")
    return width, height


def steps_of(steps: int | None, output: PictureOutput) -> int:
    """Return the number of steps that a request means. Raise InvalidRequest."""
    if steps is not None and steps > output.most_steps:
        why = f"{steps} are more than {output.most_steps}, the most of this model (worker.diffusers.most_steps)"
        raise field_error("steps", why)
    return output.steps if steps is None else steps


def picture_of(
    request: PictureRequest, output: PictureOutput, seed: int, size: tuple[int, int] | None = None
) -> Picture:
    """Return the first picture of a request for a model that makes pictures, without its images, which say the `size`
    if the request does not. Raise InvalidRequest."""
    width, height = size or size_of(request.size, output)
    return Picture(
        request.prompt,
        width,
        height,
        steps_of(request.steps, output),
        seed,
        negative=request.negative_prompt or "",
        guidance=request.guidance,
        format=request.output_format or "png",
        previews=request.partial_images or 0,
    )


def check_guided(guidance: float | None, negative: str | None, takes: PictureOutput | PictureEdit, name: str) -> None:
    """Raise InvalidRequest for a guidance or a negative prompt that a model does not take in this way. `name` is that
    of its pipeline."""
    if guidance is not None and not takes.guidance:
        raise field_error("guidance", f"{name} takes none", "unsupported_value")
    if negative and not takes.negative:
        raise field_error("negative_prompt", f"{name} takes none", "unsupported_value")


def check_text(request: PictureRequest, model: str, output: PictureOutput) -> None:
    """Raise InvalidRequest if a model does not make what a request without images asks for."""
    if not output.texts:
        why = f"{model!r} ({output.pipeline}) makes pictures from images alone: ask for them at /v1/images/edits"
        raise field_error("model", why, "unsupported_value")
    check_guided(request.guidance, request.negative_prompt, output, output.pipeline)


def strength_of(request: PictureEditRequest, model: str, output: PictureOutput) -> float | None:
    """Return how much of the images a request changes. None if the model takes no strength. Raise InvalidRequest if the
    model does not make what the request asks for."""
    edit, count = output.edit_of(masked=request.mask is not None), len(request.given)
    if edit is None and request.mask is not None:
        raise field_error("mask", f"the model {model!r} ({output.pipeline}) takes none", "unsupported_value")
    if edit is None:
        more = "; send a mask, too" if output.masked_edit else ""
        raise field_error(
            "image", f"{model!r} ({output.pipeline}) makes no pictures from images{more}", "unsupported_value"
        )
    if count > edit.images:
        raise field_error("image", f"{count} images; {output.pipeline} makes a picture from {edit.images} at most")
    check_guided(request.guidance, request.negative_prompt, edit, output.pipeline)
    if request.strength is not None and not edit.strength:
        raise field_error("strength", f"{output.pipeline} takes none", "unsupported_value")
    if not edit.strength:
        return None
    strength, steps = request.strength or edit.strength, steps_of(request.steps, output)
    if steps * strength < 1.0:
        raise field_error("strength", f"{strength:g} of {steps} steps is less than one step; raise either")
    return strength
