"""Computes log-probabilities of tokens from rows of logits, all rows at once.

logits (rows, vocab) ─▶ log-sum-exp, in float64 ─▶ each row's own token
                    └─▶ the n-th greatest ─▶ all that reach it ─▶ by logit, then by id ─▶ the n likeliest
"""

from __future__ import annotations

import numpy as np

from services.worker.native.linear import Array


def score(logits: Array, tokens: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the log-probabilities of `tokens`, one for each row of `logits` (rows, vocab), float32; and the ids and
    the log-probabilities of each row's `count` likeliest tokens, or of all that there are.

    Shapes are (rows,), (rows, count) and (rows, count); of equal tokens the one with the lower id is first. The
    log-probabilities are float64, and NaN in a row with a logit that is not finite.
    """
    rows, vocab = logits.shape
    finite = np.isfinite(logits).all(axis=1)
    if not bool(finite.all()):
        logits = np.where(finite[:, None], logits, np.float32(0))
    greatest = logits.max(axis=1)
    with np.errstate(over="ignore"):
        weights = np.exp(logits - greatest[:, None]).sum(axis=1, dtype=np.float64)
    normaliser = np.where(finite, greatest + np.log(weights), np.nan)
    logprobs = logits[np.arange(rows), tokens] - normaliser
    count = min(count, vocab)
    if count == 0:
        return logprobs, np.empty((rows, 0), np.int64), np.empty((rows, 0))
    least = np.partition(logits, vocab - count, axis=1)[:, vocab - count]
    row, candidates = np.nonzero(logits >= least[:, None])  # by row, then by id
    by_logit = np.argsort(-logits[row, candidates], kind="stable")
    order = by_logit[np.argsort(row[by_logit], kind="stable")]
    counts = np.bincount(row, minlength=rows)
    firsts = np.cumsum(counts) - counts
    top = candidates[order[firsts[:, None] + np.arange(count)]]
    return logprobs, top, np.take_along_axis(logits, top, axis=1) - normaliser[:, None]
