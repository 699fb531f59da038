"""Tokens from logits on the device: one kernel for what most requests ask, sampler.py on CuPy for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.engine import Drawn, Work
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.linear import Array
from services.worker.native.sampler import sample
from shared.errors import ModelError
from shared.messages import Sampling

_THREADS = 1024
_GREEDY_BELOW = 1e-5
"""As in sampler.py."""


def draw(kernels: Kernels, logits: Array, works: Sequence[Work]) -> list[Drawn]:
    """Draw one token a row of logits (works, vocab), float32, on the current stream; waits for it.

    The same tokens as `sample`'s but where the drawn number lies within rounding of the border of two tokens. Raises
    ModelError where a logit is not a number.
    """
    vocab = logits.shape[1]
    special = [row for row, work in enumerate(works) if not _is_plain(work.sampling, vocab)]
    if len(special) == len(works):
        return sample(cp, logits, works)
    packed = np.empty((5, len(works)), np.uint32)
    for row, work in enumerate(works):
        seed, index, temperature = work.sampling.seed, work.draw_index, work.sampling.temperature
        packed[:4].reshape(-1).view(np.uint64)[[row, len(works) + row]] = seed, index
        packed[4].view(np.float32)[row] = 1 / temperature if temperature >= _GREEDY_BELOW else 0.0
    on_device = cp.asarray(packed)
    numbers = on_device[:4].reshape(2, -1).view(cp.uint64)
    tokens = cp.empty(len(works), cp.int32)
    arguments = (tokens, logits, on_device[4], numbers[0], numbers[1], np.int32(vocab))
    kernels.choose((len(works),), (_THREADS,), arguments)
    chosen = tokens.get().tolist()
    if min(chosen) < 0:
        raise ModelError("the model computed logits that are not finite numbers")
    drawn = [Drawn(token) for token in chosen]
    if special:
        for row, one in zip(special, sample(cp, logits[special], [works[row] for row in special]), strict=True):
            drawn[row] = one
    return drawn


def _is_plain(sampling: Sampling, vocab: int) -> bool:
    """Greedy, or drawn from the model's own distribution at some temperature."""
    filtered = 0 < sampling.top_k < vocab or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if sampling.temperature < _GREEDY_BELOW:
        filtered = False
    penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    return not (filtered or penalised or sampling.logprobs >= 0)
