"""What /v1/models and /v1/models/{name} answer: OpenAI's, and vLLM's length of the context. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelEntry(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    """When this process began, in seconds of Unix time."""
    max_model_len: int
    """In tokens."""
    object: Literal["model"] = "model"
    owned_by: Literal["headrace"] = "headrace"


class ModelList(Struct, frozen=True):
    """All of them."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"
