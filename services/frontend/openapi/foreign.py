"""The operations of other providers' APIs for the OpenAPI document. Pure.

Their requests and errors are described; answers are as these providers describe them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from services.frontend.anthropic.request import CountTokensRequest, MessagesRequest
from services.frontend.ollama import request as ollama
from services.frontend.openapi.schemas import Schema
from services.frontend.protocol.operations import ForeignOperation


class ForeignDescription(Struct, frozen=True):
    """The description of one operation."""

    summary: str
    request: type[Struct]
    provider: str
    """The provider, a key of ERRORS."""
    streamed: Schema = {}
    """The content of a streamed answer by its media type; empty if it is never streamed."""
    rule: str = ""
    """What the schema of the request cannot express, in addition to AS_CHAT."""


AS_CHAT = "what a chat, a completion or a request for embeddings refuses is refused, by the name of its field here"
_TEXT: Schema = {"type": "string"}


def _object(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


ERRORS: Mapping[str, Schema] = {
    "Anthropic": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "Ollama": _object(error=_TEXT),
}
"""The schema of a failure by the provider of the API."""
_EVENTS: Schema = {"text/event-stream": {"schema": _object(event=_TEXT, data=_TEXT)}}
_LINES: Schema = {"application/x-ndjson": {"schema": _TEXT}}
_BLOCKS = "a tool_result comes after its tool_use, and is the only one; the last message is not the assistant's"
_RESULTS = "a message of role tool comes after a call of that tool without a result"
FOREIGN_DESCRIPTIONS: Mapping[ForeignOperation, ForeignDescription] = {
    "messages": ForeignDescription(
        "Answer a conversation, as Anthropic does", MessagesRequest, "Anthropic", _EVENTS, _BLOCKS
    ),
    "count_tokens": ForeignDescription(
        "Count the tokens of a conversation, as Anthropic does", CountTokensRequest, "Anthropic", rule=_BLOCKS
    ),
    "ollama_chat": ForeignDescription(
        "Answer a conversation, as Ollama does", ollama.OllamaChatRequest, "Ollama", _LINES, _RESULTS
    ),
    "ollama_generate": ForeignDescription(
        "Answer or continue a text, as Ollama does", ollama.OllamaGenerateRequest, "Ollama", _LINES
    ),
    "ollama_embed": ForeignDescription("Return texts as vectors, as Ollama does", ollama.OllamaEmbedRequest, "Ollama"),
    "ollama_show": ForeignDescription("Describe one model, as Ollama does", ollama.OllamaShowRequest, "Ollama"),
}
