"""Works as the engine loop hands them to a runner."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.contracts.runner import Work
from shared.messages.generate import Sampling

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
    """Make a work that computes `history` from `start` on; all of it is prompt by default.

    A work that does not draw has one more token, which is not computed yet.
    """
    return Work(
        sequence=sequence,
        history=history if draws else [*history, 0],
        start=start,
        end=len(history),
        blocks=blocks,
        sampling=sampling,
        prompt_tokens=len(history) if prompt_tokens is None else prompt_tokens,
    )
