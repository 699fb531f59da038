"""Makes embeddings from hidden states, for prompts in one piece or in chunks.

    pooling of a work   mean, any chunk   last, not the last chunk   last, the last chunk
    rows of its span    all               no span                    its last row
        └─▶ the decoder sums each span's hidden states after the final norm ─▶ added to the work's sum ─▶ embedding

The sum of a mean is kept with its work and begins again where the prompt does, as after a preemption. Every position is
added exactly once, because the scheduler reuses no cached block for it. Sums are float64, so that long prompts lose no
precision.

Blocks hold keys and values, not hidden states, so a mean can take nothing from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from shared.messages.frames import NOT_FINITE

Sums = NDArray[np.float64]
"""Sums of hidden states, (spans, hidden)."""


class RowSpan(Struct, frozen=True):
    """Consecutive rows of a step whose hidden states are added up."""

    first: int
    count: int


def pooling_spans(works: Sequence[Work]) -> list[RowSpan]:
    """Return the spans to sum, in order of works; most steps have none."""
    spans: list[RowSpan] = []
    first = 0
    for work in works:
        count = work.end - work.start
        if work.sampling.pooling == "mean":
            spans.append(RowSpan(first, count))
        elif work.sampling.pooling and work.ends:
            spans.append(RowSpan(first + count - 1, 1))
        first += count
    return spans


def step_results(works: Sequence[Work], drawn: Iterable[Drawn], sums: Sums) -> list[Drawn | None]:
    """Return each work's result: the next of `drawn`, an embedding, or None. `sums` are those of the works' spans.

    If a hidden state is not finite, the result is an error instead of an embedding.
    """
    tokens, left = iter(drawn), iter(sums)
    return [next(tokens) if work.draws else _pooled(work, left) for work in works]


def _pooled(work: Work, sums: Iterator[NDArray[np.float64]]) -> Drawn | None:
    match work.sampling.pooling:
        case "mean":
            total = next(sums)
            if work.start > 0:
                assert isinstance(work.kept, np.ndarray), "a mean begins where its prompt does"
                total = total + work.kept
            work.kept = total
            return _embedding(total) if work.ends else None
        case "last":
            return _embedding(next(sums)) if work.ends else None
        case "":
            return None
        case _:
            assert_never(work.sampling.pooling)


def _embedding(total: NDArray[np.float64]) -> Drawn:
    """Scale a sum to length 1, so its number of summands does not matter. A vector of zeros stays as it is."""
    length = np.linalg.norm(total)
    if not np.isfinite(length):
        return Drawn(0, error=f"{NOT_FINITE}: its hidden states", suspect=True)
    return Drawn(0, embedding=(total / (length or 1.0)).astype("<f4").tobytes())
