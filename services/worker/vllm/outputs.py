"""What a Part carries of vLLM's outputs: log probabilities and embeddings. Pure."""

from __future__ import annotations

import math
from array import array
from typing import Any

from services.worker.vllm.prompt_logprobs import finite, likeliest
from shared.hashing import pack_tokens
from shared.messages.frames import TokenLogprob


def logprob_entries(tokens: Any, positions: Any, count: int) -> tuple[TokenLogprob, ...]:
    """Return an entry for each token, with its own logprob and those of the `count` likeliest tokens."""
    entries: list[TokenLogprob] = []
    for token, position in zip(tokens, positions or (), strict=True):
        top = likeliest(position, count)
        entries.append(
            TokenLogprob(
                finite(position[token].logprob),
                pack_tokens([name for name, _ in top]),
                tuple(value for _, value in top),
            )
        )
    return tuple(entries)


def pack_embedding(values: list[float]) -> bytes:
    """Return a vector as a Part carries it: of norm 1, in little-endian float32."""
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return array("f", [value / length for value in values]).tobytes()
