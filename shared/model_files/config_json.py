"""Reads config.json: its settings, and the parameters of rotary embeddings in all forms in which files have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from shared.errors import ModelError
from shared.model_file import CONFIG, CONFIG_LIMIT_BYTES, decode_model_json, read_model_file

FULL, SLIDING = "full_attention", "sliding_attention"
"""The entries of `layer_types`, which are also the keys of nested rope parameters."""


class ConfigJson(Struct, frozen=True):
    """The content of a config.json."""

    path: Path
    content: bytes
    """The file as it is stored."""
    outer: Mapping[str, Any]
    """All settings, as they are nested in the file."""

    @property
    def text(self) -> Mapping[str, Any] | None:
        """The settings of the text part, in which a model that takes images has them. None if there is no such part."""
        text = self.outer.get("text_config")
        return text if isinstance(text, dict) else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the text part, and those of the whole that it does not have."""
        return {**self.outer, **(self.text or {})}

    @property
    def tied(self) -> Any:
        """`tie_word_embeddings`: that of the whole counts before that of the text part. None if neither has it."""
        whole = self.outer.get("tie_word_embeddings")
        return self.settings.get("tie_word_embeddings") if whole is None else whole


def read_config_json(directory: Path) -> ConfigJson:
    """Read a directory's config.json. Raise ModelError."""
    path = directory / CONFIG
    content = read_model_file(path, CONFIG_LIMIT_BYTES)
    return ConfigJson(path, content, decode_model_json(path, content, dict[str, Any]))


def rope_parameters(
    settings: Mapping[str, Any], where: str, *, default_theta: float, default_local_theta: float | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the parameters of the rotation, and those of layers that slide; None if these have no rotation of their
    own. *Pure.*

        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}            transformers 4
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}    transformers 5
        {"rope_parameters": {"full_attention": {…}, "sliding_attention": {…}}}          transformers 5, Gemma 3

    As in transformers, `rope_scaling` counts before `rope_parameters`, and of `rope_theta` the value inside before the
    one at the top of the file before `default_theta`. Architectures with a `default_local_theta` have nested
    parameters, and `rope_local_base_freq` at the top for layers that slide. Raise ModelError; `where` names the file.
    """
    scaling, stored = (_table(settings.get(name), name, where) for name in ("rope_scaling", "rope_parameters"))
    theta = settings.get("rope_theta")
    theta = default_theta if theta is None else theta
    if default_local_theta is None:
        if FULL in stored and _table(stored.get(SLIDING), SLIDING, where) not in ({}, stored[FULL]):
            raise ModelError(f"{where}: rope_parameters differ between layers, which is not supported here")
        return {"rope_theta": theta, **(scaling or _table(stored.get(FULL, stored), FULL, where))}, None
    full, sliding = (_table(stored.get(name), name, where) for name in (FULL, SLIDING))
    local = settings.get("rope_local_base_freq")
    local = default_local_theta if local is None else local
    return {"rope_theta": theta, **full, **scaling}, {"rope_theta": local, **sliding}


def _table(value: Any, name: str, where: str) -> dict[str, Any]:
    """Return the entries that are not null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {name} is a {type(value).__name__}; expected an object")
    return {key: entry for key, entry in value.items() if entry is not None}


def token_ids(value: object, name: str, where: str) -> Sequence[int]:
    """Return the ids of a setting that holds one id, several or null. Raise ModelError. *Pure.*"""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int for each in ids):
        raise ModelError(f"{where}: {name} is {value!r}; expected a token id or a list of token ids")
    return ids
