"""The bodies of vLLM's /tokenize and /detokenize, and their answers. Pure.

One Struct has the fields for a prompt and for messages, so that a field of one with the other is refused by name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.frontend.protocol.chat import (
    ChatRequest,
    TemplateKwargs,
    TokenId,
    TruncatedTokens,
    check_chat,
    check_truncation,
)
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.messages import Messages
from services.frontend.protocol.reasoning import Effort
from services.frontend.protocol.structured import ToolChoice
from services.frontend.protocol.tools import Tools

TOKENS_LIMIT = 1 << 20
"""Tokens of one request, in either direction."""


_EMPTY = Harmless(False, 0, {})


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens. By default it does for a prompt; a chat template writes them
    itself."""
    return_token_strs: bool | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    """Tokens that are kept, the last ones. -1 means as many as fit with one token of an answer."""
    # only with messages
    add_generation_prompt: bool | None = None
    """If false, the rendered text does not end with the beginning of an answer."""
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    # not built
    chat_template: Annotated[NotBuilt, _EMPTY] = None
    media_io_kwargs: Annotated[NotBuilt, _EMPTY] = None
    mm_processor_kwargs: Annotated[NotBuilt, _EMPTY] = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=TOKENS_LIMIT)]


_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
)
"""The fields of a chat that its prompt depends on."""


def decode_tokenize(body: bytes, ignored: IgnoredFields = REFUSE) -> TokenizeRequest:
    """Decode and check the body of /tokenize. Raise InvalidRequest, naming the field."""
    request = decode_body(TokenizeRequest, body, ignored)
    check_not_built(request, "", ignored)
    if (request.prompt is None) == (request.messages is None):
        raise field_error("prompt", "send either prompt or messages")
    if request.messages is None:
        for field in _CHAT_FIELDS:
            if getattr(request, field) is not None:
                raise field_error(field, "only allowed with messages")
    else:
        check_chat(chat_of(request, request.messages), ignored)
    check_truncation(request.truncate_prompt_tokens)
    return request


def chat_of(request: TokenizeRequest, messages: Messages) -> ChatRequest:
    """Return the chat with the same prompt."""
    return ChatRequest(messages=messages, **{field: getattr(request, field) for field in _CHAT_FIELDS})


def decode_detokenize(body: bytes, ignored: IgnoredFields = REFUSE) -> DetokenizeRequest:
    """Decode the body of /detokenize. Raise InvalidRequest, naming the field."""
    return decode_body(DetokenizeRequest, body, ignored)


# --- answers

TokenIds = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "integer"}})]
TokenTexts = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": ["string", "null"]}})]


class Tokenized(Struct, frozen=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: TokenTexts | None
    """The tokens as the vocabulary spells them, null for an id without a token; null if they were not requested."""


class Detokenized(Struct, frozen=True):
    """The answer of /detokenize."""

    prompt: str
