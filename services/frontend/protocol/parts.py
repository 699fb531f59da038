"""The parts of a message's content, as OpenAI's APIs and their clients write them. Pure.

Chats write texts as `text`, /v1/responses as `input_text` and `output_text`. A refusal is a text of the assistant.
Images, sounds and files are not built. In the result of a tool, which agents send again with each later request, a text
stands for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

PARTS_LIMIT = 4096
"""Content parts of one message."""

Unread = Annotated[msgspec.Raw, Meta(extra_json_schema={"description": "Anything; it is not read."})]
"""A field that clients add and that is not read. It stays undecoded, since 4 MiB of it could be a million objects."""


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


class ImageUrl(Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image, as chats write it."""


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image, as /v1/responses writes it."""


class FilePart(Struct, frozen=True, tag_field="type", tag="file"):
    """A file, as chats write it."""


class InputFile(Struct, frozen=True, tag_field="type", tag="input_file"):
    """A file, as /v1/responses writes it."""


UnseenPart = ImageUrl | InputImage | FilePart | InputFile
Part = TextPart | InputText | PastText | RefusalPart | ThinkingPart
Content = str | Annotated[list[Part], Meta(max_length=PARTS_LIMIT)]
"""A text, or its parts."""
ResultContent = str | Annotated[list[Part | UnseenPart], Meta(max_length=PARTS_LIMIT)]
"""The result of a tool: a text, or its parts."""


def unseen(kind: str) -> str:
    """Return the text that stands for an image or a file in the result of a tool."""
    return f"[{kind}: not shown, because this model reads text only]"


def unseen_parts(content: ResultContent | None) -> Iterator[tuple[int, str]]:
    """Yield the places and types of parts that the model does not see."""
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, UnseenPart):
            yield at, str(part.__struct_config__.tag)


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
