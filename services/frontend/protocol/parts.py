"""The parts of a message's content, as OpenAI's APIs and their clients write them. Pure.

Chats write texts as `text`, /v1/responses as `input_text` and `output_text`. A refusal is a text of the assistant.
Images of users are seen by models that take them. Sounds and files are not built. In the result of a tool, which agents
send again with each later request, a text stands for an image or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.errors import field_error
from shared.errors import InvalidRequest

PARTS_LIMIT = 4096
"""Content parts of one message."""

Unread = Annotated[msgspec.Raw, Meta(extra_json_schema={"description": "Anything; it is not read."})]
"""A field that clients add and that is not read. It stays undecoded, since 4 MiB of it could be a million objects."""


ImageDetail = Annotated[str, Meta(max_length=64)]
"""How closely an image is to be looked at. It has no effect: the model's processor decides that."""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text, as chats write it."""

    text: str


class InputText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A text in a message."""

    text: str


class PastText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A text in an assistant's message that the client sends back."""

    text: str
    annotations: Unread | UnsetType = UNSET
    logprobs: Unread | UnsetType = UNSET
    parsed: Unread | UnsetType = UNSET
    """The text in parsed form, which OpenAI's client adds."""


class RefusalPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """What the assistant said in place of an answer."""

    refusal: str


class ThinkingPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Reasoning, as Mistral's API writes it in an assistant's content."""

    thinking: str | Annotated[list[TextPart], Meta(max_length=PARTS_LIMIT)]
    closed: Unread | UnsetType = UNSET
    signature: Unread | UnsetType = UNSET


class ImageLink(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an image is, in a chat."""

    url: str
    """A data URI, or the URL of a host that a setting names."""
    detail: ImageDetail | None = None


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """An image, as chats write it."""

    image_url: ImageLink | str | None = None


class InputImage(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"):
    """An image, as /v1/responses writes it."""

    image_url: ImageLink | str | None = None
    detail: ImageDetail | None = None
    file_id: str | None = None
    """The id of a file; there are none here."""


class FilePart(Struct, frozen=True, tag_field="type", tag="file"):
    """A file, as chats write it."""


class InputFile(Struct, frozen=True, tag_field="type", tag="input_file"):
    """A file, as /v1/responses writes it."""


class ImageReference(Struct, frozen=True, forbid_unknown_fields=True):
    """An image, as bodies of requests for pictures and videos refer to it."""

    image_url: str | None = None
    """A data URI, or a URL."""
    file_id: str | None = None
    """The id of a file; there are none here."""


ImagePart = ImageUrl | InputImage
UnseenPart = ImagePart | FilePart | InputFile
Part = TextPart | InputText | PastText | RefusalPart | ThinkingPart
Content = str | Annotated[list[Part], Meta(max_length=PARTS_LIMIT)]
"""A text, or its parts."""
SeenContent = str | Annotated[list[Part | ImagePart], Meta(max_length=PARTS_LIMIT)]
"""A text, or its parts, which may be images."""
ResultContent = str | Annotated[list[Part | UnseenPart], Meta(max_length=PARTS_LIMIT)]
"""The result of a tool: a text, or its parts."""


class ImageSource(Struct, frozen=True):
    """An image of a request, before it is read."""

    where: str
    """Its place in the body."""
    url: str
    """A data URI, or a URL."""
    name: str = ""
    """What errors call it. Empty if that is its number."""


def image_of(part: ImagePart | ImageReference, where: str) -> ImageSource:
    """Return the image of a part at this place. Raise InvalidRequest if it has none."""
    if isinstance(part, InputImage | ImageReference) and part.file_id:
        why = "files are not kept here; give `image_url` in its place, a data URI or a URL (docs/images.md)"
        raise field_error(f"{where}.file_id", why, "unsupported_value")
    given = part.image_url
    url = given.url if isinstance(given, ImageLink) else given
    if not url:
        raise field_error(f"{where}.image_url", "needed: a data URI, or a URL (docs/images.md)")
    return ImageSource(f"{where}.image_url", url)


def not_of_user(field: str, role: str) -> InvalidRequest:
    """Return the error for an image in a message of another role than the user's."""
    why = f"images are not served in messages of role {role[:64]!a}; show them in one of role 'user'"
    return field_error(field, f"{why} (docs/images.md)", "unsupported_value")


def detail_of(part: ImagePart) -> str:
    """Return how closely an image is to be looked at. Empty if that is not said."""
    given = part.image_url
    own = part.detail if isinstance(part, InputImage) else None
    return own or (given.detail if isinstance(given, ImageLink) else None) or ""


def unseen(kind: str) -> str:
    """Return the text that stands for an image or a file in the result of a tool."""
    return f"[{kind}: not shown, because only text is read here]"


def unseen_parts(content: ResultContent | None) -> Iterator[tuple[int, UnseenPart]]:
    """Yield the places of parts that are no texts, and these parts."""
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, UnseenPart):
            yield at, part


def joined(texts: Iterable[str], role: str) -> str:
    """Return the text of a message that came in several: those of the assistant are pieces of one answer, others are
    texts of their own, between which a line ends, as in vLLM."""
    return ("" if role == "assistant" else "\n").join(filter(None, texts))


def text_of_content(content: str | Sequence[Part | UnseenPart] | None, role: str) -> str:
    """Return the text of a message's content; empty if it has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined((_text(part) for part in content), role)


def _text(part: Part | UnseenPart) -> str:
    match part:
        case ImageUrl() | InputImage():
            return unseen("image")
        case FilePart() | InputFile():
            return unseen("file")
        case RefusalPart():
            return part.refusal
        case ThinkingPart():
            return ""
        case _:
            return part.text


def thinking_of_content(content: ResultContent | None) -> str:
    """Return the reasoning in a message's content."""
    if not isinstance(content, list):
        return ""
    thoughts = [part.thinking for part in content if isinstance(part, ThinkingPart)]
    return "".join(one if isinstance(one, str) else "".join(text.text for text in one) for one in thoughts)
