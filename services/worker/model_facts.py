"""What a model's directory says of it, for engines that do no arithmetic."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from services.worker.config import Natural, Positive
from services.worker.messages import Ready
from shared.errors import ModelError
from shared.messages import KvLayout
from shared.model_file import CONFIG_LIMIT_BYTES, read_model_file

_DEFAULT_CAPACITY_BLOCKS = 4096


class _Config(Struct):
    """Of config.json what is needed here."""

    max_position_embeddings: Positive
    vocab_size: Positive
    eos_token_id: Natural | Annotated[list[Natural], Meta(min_length=1)]
    hidden_size: Natural = 0


def facts_of(directory: Path, *, block_size: int, capacity_blocks: int) -> Ready:
    """Sizes from the model's config.json; `capacity_blocks` 0: some thousand. Raises ModelError."""
    file = directory / "config.json"
    content = read_model_file(file, CONFIG_LIMIT_BYTES)
    try:
        config = msgspec.convert(json.loads(content), _Config)
    except ValueError as wrong:  # UTF-8's, JSON's and msgspec's
        raise ModelError(f"{file}: {wrong}") from wrong
    except RecursionError:
        raise ModelError(f"{file}: nested too deeply") from None
    eos = config.eos_token_id
    return Ready(
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        block_size=block_size,
        capacity_blocks=capacity_blocks or _DEFAULT_CAPACITY_BLOCKS,
        kv_layout=KvLayout(dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=block_size),
        path=str(directory),
        embedding_size=config.hidden_size,
        weights=hashlib.sha256(b"none computed " + content).hexdigest()[:16],
    )
