"""The body of /v1/embeddings and its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from services.frontend.protocol.chat import CacheName, Priority, Seconds, TokenCount, TokenId
from services.frontend.protocol.decoding import decode_body, texts_or_ids
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.parts import Unread
from shared.errors import InvalidRequest

INPUTS_LIMIT = 2048
"""OpenAI's limit of inputs in one request."""
TOKENS_LIMIT = 1 << 20
"""Tokens of all inputs together."""
NUMBERS_LIMIT = 1 << 22
"""Numbers of all vectors together: 16 MiB, 22 MiB as base64 and some 85 MiB in decimal."""

Input = str | Sequence[int]
"""One input, as a text or as token ids."""


class EmbeddingRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | list[TokenId | str | list[TokenId]]
    """An input, as a text or as token ids, or a list of inputs."""
    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    encoding_format: Literal["float", "base64"] | None = None
    """The form of vectors: decimal numbers (the default), or base64 of little-endian float32."""
    dimensions: TokenCount | None = None
    """How many leading numbers of each vector to keep, scaled to length 1 again. The default is all that the model
    has."""
    # our own
    pooling: Literal["mean", "last"] | None = None
    """Which positions make the vector: their mean, or the last. The default is what the model was trained for."""
    cache_salt: CacheName | None = None
    """vLLM's field: inputs share cached blocks only with prompts that have the same salt."""
    priority: Priority | None = None
    """vLLM's field: requests with a lower value are computed first. The default is 0; the API key bounds it."""
    deadline_s: Seconds | None = None
    """Seconds that the request may take; the server has a limit."""
    # harmless
    user: Unread | UnsetType = UNSET


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """A vector of length 1; a text if base64 was requested."""


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Struct, frozen=True, kw_only=True):
    """The answer of /v1/embeddings, with vectors in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    id: str
    """An addition to OpenAI's fields, since other answers have an id too."""


def decode_embeddings(body: bytes, ignored: IgnoredFields = REFUSE) -> EmbeddingRequest:
    """Decode and check the body of an embeddings request. Raise InvalidRequest, naming the field."""
    request = decode_body(EmbeddingRequest, body, ignored)
    inputs_of(request)
    return request


def inputs_of(request: EmbeddingRequest) -> dict[str, Input]:
    """Return the inputs by the name of their place in the body. Raise InvalidRequest."""
    inputs = texts_or_ids(request.input, "input", INPUTS_LIMIT)
    for name, one in inputs.items():
        if not one:
            raise InvalidRequest(f"{name} is empty", param=name)
    return inputs
