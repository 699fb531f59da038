"""Structs for answers that are not encoded from a Struct, for the OpenAPI document. Pure.

These are the chunks that chat_chunks.py joins from bytes and the answers of shared/runtime/observe.py. Tests compare
real answers with them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat_chunks import AnswerIdentity, ChatLogprobs, CompletionLogprobs, ToolCall, Usage

FinishReason = Literal["stop", "length", "tool_calls"]
Index = Annotated[int, Meta(ge=0)]


class ChatChunkDelta(Struct, frozen=True):
    """The text that a chunk adds; it is empty in the chunk that says why the answer ended."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The part of a chunk that belongs to one choice."""

    index: Index
    delta: ChatChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    """The new tokens, present with `return_token_ids`."""


class ChatChunk(AnswerIdentity, frozen=True):
    """One event of a streamed chat. It has one choice, or none in the event with the usage."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"]
    usage: Usage | UnsetType | None = UNSET
    """The usage, present with `stream_options.include_usage`; null in all chunks but the last."""
    service_tier: Literal["default"] | UnsetType = UNSET
    """The service tier, present if the request has one."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The tokens of the prompt, present in the first chunk with `return_token_ids`."""


class CompletionChunkChoice(Struct, frozen=True):
    """The part of a chunk that belongs to one choice."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    """The new tokens, present with `return_token_ids`."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The tokens of the prompt, present in a choice's first chunk with `return_token_ids`."""


class CompletionChunk(AnswerIdentity, frozen=True):
    """One event of a streamed completion. It has one choice, or none in the event with the usage."""

    choices: list[CompletionChunkChoice]
    object: Literal["text_completion"]
    usage: Usage | UnsetType | None = UNSET


class Version(Struct, frozen=True):
    """The version of the frontend that answers."""

    version: str


class Health(Struct, frozen=True):
    """Whether a request would be served now. If keys are required, only `ready` is there."""

    ready: bool
    reasons: list[str] | UnsetType = UNSET
    """The reasons why no request would be served."""
    models: list[str] | UnsetType = UNSET
