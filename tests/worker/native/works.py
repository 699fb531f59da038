"""Shares of a step as the engine loop would hand them over."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine import Work
from shared.messages import Sampling

GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


def work(
    history: Sequence[int],
    blocks: Sequence[int],
    *,
    start: int = 0,
    sampling: Sampling = GREEDY,
    prompt_tokens: int | None = None,
    draws: bool = True,
    sequence: int = 0,
) -> Work:
    """Computes `history` from `start` on; all of it is prompt unless told otherwise."""
    return Work(
        sequence=sequence,
        tokens=history[start:],
        start=start,
        blocks=blocks,
        draws=draws,
        sampling=sampling,
        history=history,
        prompt_tokens=len(history) if prompt_tokens is None else prompt_tokens,
    )
