"""Prints which fields the requests of Anthropic's, Ollama's and OpenAI's own clients have, as JSON.

operation → {"fields": those of the body, "nested": those of objects anywhere in it}
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import ollama._types as ollama
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_retrieve_params
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

HEADERS = {"betas"}
"""Arguments of the clients that go into headers."""
REQUESTS: dict[str, list[Any]] = {
    "chat": [chat_params.CompletionCreateParamsBase],
    "completions": [completion_create_params.CompletionCreateParamsBase],
    "responses": [response_create_params.ResponseCreateParamsBase],
    "retrieve_response": [response_retrieve_params.ResponseRetrieveParamsBase],
    "embeddings": [embedding_create_params.EmbeddingCreateParams],
    "messages": [message_create_params.MessageCreateParamsBase, beta_create_params.MessageCreateParamsBase],
    "count_tokens": [
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ],
    "ollama_chat": [ollama.ChatRequest],
    "ollama_generate": [ollama.GenerateRequest],
    "ollama_embed": [ollama.EmbedRequest],
    "ollama_show": [ollama.ShowRequest],
    "ollama_options": [ollama.Options],
}


def fields(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict or a model, by the names that they have in a body."""
    if is_typeddict(kind):
        found = get_type_hints(kind, include_extras=True)
        return {alias(type_) or name: type_ for name, type_ in found.items() if name not in HEADERS}
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def alias(type_: Any) -> str | None:
    """The name in a body that a client's `PropertyInfo` gives."""
    found = [getattr(mark, "alias", None) for mark in getattr(type_, "__metadata__", ())]
    return next((one for one in found if one), None) or next(
        (
            one
            for inner in typing.get_args(type_)
            if "Required" in str(typing.get_origin(type_)) and (one := alias(inner))
        ),
        None,
    )


def objects(type_: Any) -> Iterator[Any]:
    """The TypedDicts and models in a type."""
    if is_typeddict(type_) or (isinstance(type_, type) and issubclass(type_, BaseModel)):
        yield type_
    for inner in typing.get_args(type_):
        yield from objects(inner)


def nested(kinds: list[Any]) -> dict[str, set[str]]:
    """The fields of all objects in these ones, by the name of the object's type."""
    seen: list[Any] = []
    found: dict[str, set[str]] = {}
    waiting = [one for kind in kinds for type_ in fields(kind).values() for one in objects(type_)]
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.append(kind)
            found.setdefault(kind.__name__.removeprefix("Beta"), set()).update(fields(kind))
            waiting += [one for type_ in fields(kind).values() for one in objects(type_)]
    return found


print(
    json.dumps(
        {
            operation: {
                "": sorted({name for kind in kinds for name in fields(kind)}),
                **{name: sorted(found) for name, found in nested(kinds).items()},
            }
            for operation, kinds in REQUESTS.items()
        }
    )
)
