"""The answers of /v1/models and /v1/models/{name}: OpenAI's fields, and vLLM's `max_model_len`. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.cards import SamplingDefaults


class ModelEntry(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    """Unix time in seconds when this process started."""
    max_model_len: int
    """Length of the context in tokens."""
    object: Literal["model"] = "model"
    owned_by: Literal["headrace"] = "headrace"
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """The sampling parameters of requests that do not set them."""
    root: str = ""
    """What is served under the name: the name itself, or of a LoRA the id, which names its files."""
    parent: str | None = None
    """The name of the model that a LoRA changes. Null if it is no LoRA."""


class ModelList(Struct, frozen=True):
    """The models that are served."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"
