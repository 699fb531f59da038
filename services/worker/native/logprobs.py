"""Computes log-probabilities of tokens from rows of logits, all rows at once.

logits (rows, vocab) ─▶ log-sum-exp, in float64 ─▶ each row's own token
                    └─▶ the n-th greatest ─▶ all that reach it ─▶ by logit, then by id ─▶ the n likeliest
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from services.worker.native.linear import Array


def score(xp: ModuleType, logits: Array, tokens: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the log-probabilities of `tokens`, one for each row of `logits` (rows, vocab), float32; and the ids and
    the log-probabilities of each row's `count` likeliest tokens, or of all that there are.

    Shapes are (rows,), (rows, count) and (rows, count); of equal tokens the one with the lower id is first. The
    log-probabilities are float64, and NaN in a row with a logit that is not finite.
    """
    rows, vocab = logits.shape
    finite = xp.isfinite(logits).all(axis=1)
    if not bool(finite.all()):
        logits = xp.where(finite[:, None], logits, xp.float32(0))
    greatest = logits.max(axis=1)
    with np.errstate(over="ignore"):
        weights = xp.exp(logits - greatest[:, None]).sum(axis=1, dtype=np.float64)
    normaliser = xp.where(finite, greatest + xp.log(weights), np.nan)
    logprobs = logits[xp.arange(rows), tokens] - normaliser
    count = min(count, vocab)
    if count == 0:
        return logprobs, xp.empty((rows, 0), np.int64), xp.empty((rows, 0))
    least = xp.partition(logits, vocab - count, axis=1)[:, vocab - count]
    row, candidates = xp.nonzero(logits >= least[:, None])  # by row, then by id
    by_logit = xp.argsort(-logits[row, candidates], kind="stable")
    order = by_logit[xp.argsort(row[by_logit], kind="stable")]
    counts = xp.bincount(row, minlength=rows)
    firsts = xp.cumsum(counts) - counts
    top = candidates[order[firsts[:, None] + xp.arange(count)]]
    return logprobs, top, xp.take_along_axis(logits, top, axis=1) - normaliser[:, None]
