"""The body of /v1/embeddings and its answer, typed; fields are classed as protocol/chat.py says. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from services.frontend.protocol.chat import CacheName, Label, Seconds, TokenCount, TokenId
from services.frontend.protocol.decoding import decode_body
from shared.errors import InvalidRequest

INPUTS_LIMIT = 2048
"""OpenAI's."""
TOKENS_LIMIT = 1 << 20
"""Of all inputs together."""
NUMBERS_LIMIT = 1 << 22
"""Of all vectors together: 16 MiB, 22 as base64 and some 85 in decimal."""

Input = str | list[int]
"""A text, or token ids."""


class EmbeddingRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[TokenId | str | list[TokenId]]
    """A text or token ids, or a list of either."""
    model: str | None = None
    """None: the only one that is served."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of little-endian float32. None: float."""
    dimensions: TokenCount | None = None
    """The leading ones that are left, scaled to length 1 again; at most the model's. None: all."""
    # our own
    pooling: Literal["mean", "last"] | None = None
    """Of which positions; None: what the model is meant for."""
    cache_salt: CacheName | None = None
    """vLLM's: inputs share cached blocks only with prompts of the same salt."""
    deadline_s: Seconds | None = None
    """How long the request may take; the server has a limit."""
    # harmless
    user: Label | None = None


class Embedding(Struct, frozen=True, kw_only=True):
    """One input's."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Of length 1; a text where base64 was asked for."""


class EmbeddingUsage(Struct, frozen=True):
    """Tokens counted, of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Struct, frozen=True, kw_only=True):
    """In the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    id: str
    """Ours, as other answers have one."""


_EMBEDDINGS = msgspec.json.Decoder(EmbeddingRequest)


def decode_embeddings(body: bytes) -> EmbeddingRequest:
    """Raises InvalidRequest, naming the field."""
    request = decode_body(_EMBEDDINGS, body)
    inputs_of(request)
    return request


def inputs_of(request: EmbeddingRequest) -> dict[str, Input]:
    """Each by the name of its field. Raises InvalidRequest."""
    given = request.input
    inputs: dict[str, Input] = {}
    ids = [one for one in given if isinstance(one, int)]
    if isinstance(given, str):
        inputs["input"] = given
    elif len(ids) == len(given):
        inputs["input"] = ids
    elif len(given) > INPUTS_LIMIT:
        raise InvalidRequest(f"input: {len(given)} inputs, more than {INPUTS_LIMIT}", param="input")
    else:
        for at, one in enumerate(given):
            if isinstance(one, int):
                wrong = "input: a list of token ids, of texts, or of lists of token ids; not mixed"
                raise InvalidRequest(wrong, param=f"input[{at}]")
            inputs[f"input[{at}]"] = one
    for name, one in inputs.items():
        if not one:
            raise InvalidRequest(f"{name} is empty", param=name)
    return inputs
