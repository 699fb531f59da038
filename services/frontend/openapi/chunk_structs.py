"""Answers that are not written through a Struct, as Structs, for the OpenAPI document: chunks that chat_chunks.py puts
together from bytes, and what shared/runtime/observe.py says. Tests hold real ones to them. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat_chunks import ChatLogprobs, CompletionLogprobs, ToolCall, Usage

FinishReason = Literal["stop", "length", "tool_calls"]
Index = Annotated[int, Meta(ge=0)]


class ChatChunkDelta(Struct, frozen=True):
    """What a chunk adds; nothing in the one that says why the answer ended."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """One answer's part of a chunk."""

    index: Index
    delta: ChatChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Struct, frozen=True):
    """One event of a streamed chat, of one choice; the one that has the usage is of none."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"]
    usage: Usage | UnsetType | None = UNSET
    """There with `stream_options.include_usage`; null in all but the last."""
    service_tier: Literal["default"] | UnsetType = UNSET
    """There where the request had one."""


class CompletionChunkChoice(Struct, frozen=True):
    """One answer's part of a chunk."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(Struct, frozen=True):
    """One event of a streamed completion, as of a chat."""

    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    object: Literal["text_completion"]
    usage: Usage | UnsetType | None = UNSET


class Version(Struct, frozen=True):
    """Of the frontend that answers."""

    version: str


class Health(Struct, frozen=True):
    """Whether a request would be served now. Where keys are asked for, no more than that."""

    ready: bool
    reasons: list[str] | UnsetType = UNSET
    """Why not."""
    models: list[str] | UnsetType = UNSET
