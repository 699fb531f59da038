"""EchoRunner: says the prompt back, token by token, then ends. No arithmetic; for tests and for trying the wiring."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.worker.engine import Drawn, Ready, Work
from shared.errors import ModelError
from shared.messages import KvLayout, TokenLogprob

_DEFAULT_CAPACITY_BLOCKS = 4096


class EchoRunner:
    """Draws token i of the prompt as token i of the output, and behind the prompt its end of sequence."""

    def __init__(self, facts: Ready) -> None:
        self.facts = facts

    @staticmethod
    def of(directory: Path, *, block_size: int, capacity_blocks: int) -> EchoRunner:
        """Sizes from the model's config.json. Raises ModelError."""
        file = directory / "config.json"
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            eos = config["eos_token_id"]
            facts = Ready(
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
        return EchoRunner(facts)

    def step(self, works: Sequence[Work]) -> list[Drawn | None]:
        return [self._draw(work) if work.draws else None for work in works]

    def close(self) -> None:
        pass

    def _draw(self, work: Work) -> Drawn:
        index = work.draw_index
        token = work.history[index] if index < work.prompt_tokens else self.facts.eos_token_ids[0]
        return Drawn(token, TokenLogprob(0.0) if work.sampling.logprobs >= 0 else None)
