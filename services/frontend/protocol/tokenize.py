"""The bodies of vLLM's /tokenize and /detokenize, and their answers. Pure.

One Struct has the fields for a prompt and for messages, so that a field of one with the other is refused by name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.frontend.protocol.chat import Messages, TemplateKwargs, TokenId, check_message
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.tools import Tools, check_tools

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
    # only with messages
    add_generation_prompt: bool | None = None
    """False: the rendered text does not end with the beginning of an answer."""
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    # not built
    continue_final_message: Annotated[NotBuilt, _EMPTY] = None
    chat_template: Annotated[NotBuilt, _EMPTY] = None
    media_io_kwargs: Annotated[NotBuilt, _EMPTY] = None
    mm_processor_kwargs: Annotated[NotBuilt, _EMPTY] = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=TOKENS_LIMIT)]


_ONLY_WITH_MESSAGES = ("add_generation_prompt", "tools", "chat_template_kwargs")

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes, ignored: IgnoredFields = REFUSE) -> TokenizeRequest:
    """Decode and check the body of /tokenize. Raise InvalidRequest, naming the field."""
    request = decode_body(_TOKENIZE, body, ignored)
    check_not_built(request, "", ignored)
    if (request.prompt is None) == (request.messages is None):
        raise field_error("prompt", "send either prompt or messages")
    if request.messages is None:
        for field in _ONLY_WITH_MESSAGES:
            if getattr(request, field) is not None:
                raise field_error(field, "only allowed with messages")
    for at, message in enumerate(request.messages or ()):
        check_message(message, f"messages[{at}]")
    check_tools(request.tools or ())
    return request


def decode_detokenize(body: bytes, ignored: IgnoredFields = REFUSE) -> DetokenizeRequest:
    """Decode the body of /detokenize. Raise InvalidRequest, naming the field."""
    return decode_body(_DETOKENIZE, body, ignored)


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
