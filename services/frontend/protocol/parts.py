"""The parts of a message's content, as OpenAI's APIs and their clients write them. Pure.

Chats write texts as `text`, /v1/responses as `input_text` and `output_text`. A refusal is a text of the assistant.
Images, sounds and files are not built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


Part = TextPart | InputText | PastText | RefusalPart | ThinkingPart
Content = str | Annotated[list[Part], Meta(max_length=PARTS_LIMIT)]
"""A text, or its parts."""


def joined(texts: Iterable[str], role: str) -> str:
    """Return the text of a message that came in several: those of the assistant are pieces of one answer, others are
    texts of their own, between which a line ends, as in vLLM."""
    return ("" if role == "assistant" else "\n").join(filter(None, texts))


def text_of_content(content: Content | None, role: str) -> str:
    """Return the text of a message's content; empty if it has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined((_text(part) for part in content), role)


def _text(part: Part) -> str:
    match part:
        case RefusalPart():
            return part.refusal
        case ThinkingPart():
            return ""
        case _:
            return part.text


def thinking_of_content(content: Content | None) -> str:
    """Return the reasoning in a message's content."""
    parts: Sequence[Part] = content if isinstance(content, list) else ()
    thoughts = [part.thinking for part in parts if isinstance(part, ThinkingPart)]
    return "".join(one if isinstance(one, str) else "".join(text.text for text in one) for one in thoughts)
