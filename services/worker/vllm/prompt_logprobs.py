"""The log probabilities of tokens, from vLLM's entries to what parts carry. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shared.hashing import pack_tokens
from shared.messages.frames import PromptLogprobs

LOWEST = -9999.0
"""The log probability that stands for minus infinity."""


def prompt_pieces(
    tokens: Sequence[int], positions: Sequence[Any], count: int, most_bytes: int
) -> Iterator[PromptLogprobs]:
    """Yield the log probabilities of all tokens after the first, each with those of the `count` likeliest tokens there.

    `positions` has for each token what vLLM found there, as token id → its Logprob; None for the first. A piece has at
    most `most_bytes`, or one token."""
    logprobs, top_logprobs = array("f"), array("f")
    top_tokens: list[int] = []
    for token, position in zip(tokens[1:], positions[1:], strict=True):
        logprobs.append(finite(position[token].logprob))
        top = likeliest(position, count)
        top_tokens.extend(name for name, _ in top)
        top_logprobs.extend(value for _, value in top)
    if logprobs:
        whole = PromptLogprobs(1, logprobs.tobytes(), pack_tokens(top_tokens), top_logprobs.tobytes())
        yield from whole.pieces(most_bytes)


def likeliest(position: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens of a position with their log probabilities. vLLM adds the token that is
    there, whatever its rank."""
    top = sorted((one.rank, name, one.logprob) for name, one in position.items() if one.rank <= count)[:count]
    return [(name, finite(value)) for _, name, value in top]


def finite(logprob: float) -> float:
    """Return a log probability, or LOWEST if it is not finite."""
    return logprob if math.isfinite(logprob) else LOWEST
