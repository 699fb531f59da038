"""Embeddings from hidden states, a prompt in one piece or in chunks, on a CPU or behind a GPU.

    work of a step    | a chunk of a mean | a chunk of a last, no end | the end of a last | of a mean | …
    spans, in rows      all of them         none                        its last row        all
        └─▶ (the decoder) sums of hidden states behind the final norm, one a span ─▶ added to what is kept ─▶ vectors

The sum of a mean is kept with its work and begins anew where the prompt does, as after a preemption: what it adds up is
every position exactly once, because the scheduler lets it reuse none. In float64, so that no length of prompt shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.runner import Drawn, Work
from shared.messages import NOT_FINITE

Sums = NDArray[np.float64]
"""(spans, hidden)."""


class RowSpan(Struct, frozen=True):
    """Consecutive rows of a step, whose hidden states are added up."""

    first: int
    count: int


def pooling_spans(works: Sequence[Work]) -> list[RowSpan]:
    """One for each work that something is kept or comes of, in order of works; empty of most steps."""
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
    """What comes of each work of a step: the next of `drawn`, an embedding, or None. `sums` are of the works' spans.
    Where a hidden state is not finite there is the error instead of an embedding."""
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
    """Of length 1: what a sum is divided by does not matter. A vector of zeros has no direction and stays as it is."""
    length = np.linalg.norm(total)
    if not np.isfinite(length):
        return Drawn(0, error=f"{NOT_FINITE}: its hidden states", suspect=True)
    return Drawn(0, embedding=(total / (length or 1.0)).astype("<f4").tobytes())
