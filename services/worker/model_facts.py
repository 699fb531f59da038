"""What a model's directory says of it, for engines that do no arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.worker.engine import Ready
from shared.errors import ModelError
from shared.messages import KvLayout

_DEFAULT_CAPACITY_BLOCKS = 4096


def facts_of(directory: Path, *, block_size: int, capacity_blocks: int) -> Ready:
    """Sizes from the model's config.json; `capacity_blocks` 0: some thousand. Raises ModelError."""
    file = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        eos = config["eos_token_id"]
        return Ready(
            context_length=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (int(eos),),
            block_size=block_size,
            capacity_blocks=capacity_blocks or _DEFAULT_CAPACITY_BLOCKS,
            kv_layout=KvLayout(dtype="float32", layers=0, kv_heads=0, head_dim=0, block_size=block_size),
            path=str(directory),
        )
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ModelError(f"{file}: {wrong!r}") from wrong
