"""The bodies of vLLM's /tokenize and /detokenize, and their answers, typed; fields are classed as chat.py says. Pure.

A prompt and messages are one Struct, so that a field of the one beside the other is refused by name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.frontend.protocol.chat import Messages, TemplateKwargs, TokenId, check_message
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.tools import Tools, check_tools
from shared.errors import InvalidRequest

TOKENS_LIMIT = 1 << 20
"""Of one request, either way."""


_EMPTY = Harmless(False, 0, {})


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    """None: the only one that is served."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Those that the tokenizer puts around a text. None: around a prompt; a chat template writes them itself."""
    return_token_strs: bool | None = None
    # beside messages
    add_generation_prompt: bool | None = None
    """False: the template is told not to end where an answer begins."""
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    # not built
    continue_final_message: Annotated[NotBuilt, _EMPTY] = None
    chat_template: Annotated[NotBuilt, _EMPTY] = None
    media_io_kwargs: Annotated[NotBuilt, _EMPTY] = None
    mm_processor_kwargs: Annotated[NotBuilt, _EMPTY] = None


class DetokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=TOKENS_LIMIT)]


_OF_MESSAGES = ("add_generation_prompt", "tools", "chat_template_kwargs")

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Raises InvalidRequest, naming the field."""
    request = decode_body(_TOKENIZE, body)
    check_not_built(request)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt: either this or messages", param="prompt")
    if request.messages is None:
        for field in _OF_MESSAGES:
            if getattr(request, field) is not None:
                raise InvalidRequest(f"{field}: only beside messages", param=field)
    for at, message in enumerate(request.messages or ()):
        check_message(message, f"messages[{at}]")
    check_tools(request.tools or ())
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises InvalidRequest, naming the field."""
    return decode_body(_DETOKENIZE, body)


# --- answers

TokenIds = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "integer"}})]
TokenTexts = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array", "items": {"type": ["string", "null"]}})]


class Tokenized(Struct, frozen=True):
    """What /tokenize answers."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: TokenTexts | None
    """As the vocabulary has them; null where they were not asked for, and for an id that has no token."""


class Detokenized(Struct, frozen=True):
    """What /detokenize answers."""

    prompt: str
