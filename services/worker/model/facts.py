"""What the files in a model's directory say of it: its sizes, for engines that do no arithmetic, and how embeddings are
pooled."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from services.worker.config import Natural, Positive, SamplingConfig
from services.worker.contracts.messages import Ready
from services.worker.model.architectures import architecture_of
from shared.errors import ModelError
from shared.messages.cards import KvLayout, Pooling, SamplingDefaults
from shared.model_file import CONFIG_LIMIT_BYTES, decode_model_json, read_model_file, read_model_json
from shared.model_files.config_json import read_config_json
from shared.model_files.special_tokens import read_end_tokens

_DEFAULT_CAPACITY_BLOCKS = 4096
_MODULES = frozenset(("Transformer", "Pooling", "Normalize"))
"""The modules of sentence-transformers that are computed here. Another one, such as Dense, would change the vector."""
_POOLINGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class _Config(Struct):
    """The fields of config.json that are needed here."""

    max_position_embeddings: Positive
    vocab_size: Positive
    hidden_size: Natural = 0


class _Module(Struct):
    type: str


def facts_of(directory: Path, *, block_size: int, capacity_blocks: int) -> Ready:
    """Return the sizes in the model's config.json, of its text part where it has several. A `capacity_blocks` of 0
    becomes 4096. Raise ModelError."""
    file = read_config_json(directory)
    named = file.outer.get("architectures")
    try:
        described = architecture_of(str(named[0]), file.text) if isinstance(named, list) and named else None
    except ValueError as wrong:
        raise ModelError(f"{file.path}: text_config.{wrong}") from None
    defaults = {} if described is None else described.defaults
    said = {name: value for name, value in file.settings.items() if value is not None}
    try:
        config = msgspec.convert({**defaults, **said}, _Config)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{file.path}: {wrong}") from None
    default = None if described is None else described.eos_token_id
    ends = read_end_tokens(directory, file, config.vocab_size, default)
    if not ends:
        raise ModelError(f"{file.path}: eos_token_id is missing, and no other file names a token that ends an answer")
    return Ready(
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=ends,
        block_size=block_size,
        capacity_blocks=capacity_blocks or _DEFAULT_CAPACITY_BLOCKS,
        kv_layout=KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=block_size),
        path=str(directory),
        min_tokens=True,
        embedding_size=config.hidden_size,
        weights=hashlib.sha256(b"none computed " + file.content).hexdigest()[:16],
    )


def read_sampling(directory: Path, settings: SamplingConfig) -> SamplingDefaults:
    """Return what the model's generation_config.json (may be missing) recommends, with the settings in place of it.

    Raises ModelError."""
    path = directory / "generation_config.json"
    content = read_model_file(path, CONFIG_LIMIT_BYTES, missing=b"{}")
    recommended = decode_model_json(path, content, dict[str, Any])
    names = SamplingDefaults.__struct_fields__
    chosen = {name: value for name in names if (value := recommended.get(name)) is not None}
    if chosen.get("top_k") == -1:  # files made for vLLM say so that all tokens count
        chosen["top_k"] = 0
    try:
        sampling = msgspec.convert(chosen, SamplingDefaults)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{path}: {wrong}") from None
    given = {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not None}
    return msgspec.structs.replace(sampling, **given)


def read_pooling(directory: Path) -> Pooling:
    """Return how sentence-transformers' files next to a model say that its embeddings are pooled: as the mean where no
    file says anything; empty if they ask for what is not built here. Raise ModelError.

    modules.json             [{"type": "sentence_transformers.models.Transformer", …}, …Pooling, …Normalize]
    1_Pooling/config.json    {"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, …}
    """
    modules = read_model_json(directory / "modules.json", list[_Module], missing=b"[]")
    default = b'{"pooling_mode_mean_tokens": true}'
    config = read_model_json(directory / "1_Pooling" / "config.json", dict[str, object], missing=default)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    known = all(module.type.rpartition(".")[2] in _MODULES for module in modules)
    if not known or len(modes) != 1 or config.get("include_prompt") is False:
        return ""
    return _POOLINGS.get(modes[0], "")
