"""The log probabilities of a prompt's tokens, from vLLM's entries to what parts carry. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from shared.hashing import pack_tokens
from shared.messages import PromptLogprobs

LOWEST = -9999.0
"""The log probability that stands for minus infinity."""


def prompt_pieces(
    tokens: Sequence[int], positions: Sequence[Any], count: int, most_bytes: int
) -> Iterator[PromptLogprobs]:
    """Yield the log probabilities of all tokens after the first, each with those of the `count` likeliest tokens there.

    `positions` has for each token what vLLM found there, as token id → its Logprob; None for the first. A piece has at
    most `most_bytes`, or one token."""
    most = max(1, most_bytes // (4 + 8 * count))
    for first in range(1, len(positions), most):
        logprobs, top_logprobs = array("f"), array("f")
        top_tokens: list[int] = []
        for token, position in zip(tokens[first : first + most], positions[first : first + most], strict=True):
            logprobs.append(finite(position[token].logprob))
            top = sorted((one.rank, name, one.logprob) for name, one in position.items() if one.rank <= count)[:count]
            top_tokens.extend(name for _, name, _ in top)
            top_logprobs.extend(finite(value) for _, _, value in top)
        yield PromptLogprobs(first, logprobs.tobytes(), pack_tokens(top_tokens), top_logprobs.tobytes())


def finite(logprob: float) -> float:
    """Return a log probability, or LOWEST where it is not finite."""
    return logprob if math.isfinite(logprob) else LOWEST
