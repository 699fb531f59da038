"""Draws tokens from logits; each row has its own settings and does not depend on the other rows.

    logits ─▶ biases, penalties, mask ─▶ greatest                                            temperature 0
       │                             └─▶ ÷ temperature ─▶ top_k ─▶ top_p ─▶ min_p ─▶ draw    otherwise
       └────▶ log-probabilities of the raw logits, if a request asks for them

A mask says which tokens a row may draw; the others count as if the model had given them no weight. It is what the row's
grammar allows of the tokens that the request allows, without those that would end the output before `min_tokens`. If
nothing would be left, the grammar's tokens count alone, and those that end the output stay.

Biases are OpenAI's `logit_bias`. Penalties are OpenAI's (presence, frequency: over the output) and CTRL's (repetition:
over prompt and output), in vLLM's order: biases, repetition, the others. Then temperature and the filters in
transformers' order (`_get_logits_processor`).
Log-probabilities are vLLM's default, `raw_logprobs`: those of the model's distribution before any of this.

A token is drawn by inverting the cumulative distribution at one Philox number with the key (seed, index of the token in
the output). So the same logits and settings draw the same token in any batch and on any worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from services.worker.native.linear import Array
from services.worker.native.logprobs import score
from services.worker.native.masks import NO_MASKS, Masks
from shared.hashing import pack_tokens, token_array
from shared.messages.frames import NOT_FINITE, TokenLogprob
from shared.messages.generate import Sampling

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy (vLLM's bound): dividing by it would overflow."""
_LOGIT_LIMIT = 1e30
NO_TOKEN = Drawn(0, error=f"{NOT_FINITE}: its logits", suspect=True)
"""The result of a row with a logit that is not finite."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, √3 - 1
_LOW = 0xFFFFFFFF


def philox(counter: Array, key: Array) -> Array:
    """Apply ten rounds of Philox4x32 to counter (n, 4) and key (n, 2), u32 numbers in u64 arrays; return (n, 4) of the
    same.

    Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); test vectors in Random123. There
    is no state: a request's seed and its number of tokens determine the next number, on any worker.
    """
    low, half = np.uint64(_LOW), np.uint64(32)
    c0, c1, c2, c3 = (counter[:, column] for column in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(10):
        p0, p1 = c0 * np.uint64(_MULTIPLIERS[0]), c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & low, (k1 + np.uint64(_KEY_STEPS[1])) & low
    return np.stack([c0, c1, c2, c3], axis=1)


def uniform(seeds: Array, draws: Array) -> Array:
    """Return a number of [0, 1) with 53 random bits for each u64 seed and index of the draw."""
    low, half = np.uint64(_LOW), np.uint64(32)
    nothing = np.zeros_like(draws)
    counter = np.stack([draws & low, draws >> half, nothing, nothing], axis=1)
    words = philox(counter, np.stack([seeds & low, seeds >> half], axis=1))
    return ((words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))).astype(np.float64) * 2.0**-53


def sample(logits: Array, works: Sequence[Work], masks: Masks = NO_MASKS) -> list[Drawn]:
    """Draw one token for each row of `logits` (works, vocab), float32, which stay unchanged.

    A row whose grammar has failed gets an error instead of a token, and so does a row with a logit that is not finite:
    no token of it would be the model's.
    """
    finite = np.isfinite(logits).all(axis=1).tolist()
    if all(finite):
        return _drawn(logits, works, masks)
    sound = [row for row, is_finite in enumerate(finite) if is_finite]
    drawn = iter(_drawn(logits[sound], [works[row] for row in sound], masks) if sound else ())
    return [next(drawn) if is_finite else NO_TOKEN for is_finite in finite]


def _drawn(logits: Array, works: Sequence[Work], masks: Masks) -> list[Drawn]:
    """Draw tokens from finite logits."""
    penalised = _masked(_penalised(_biased(logits, works), works), works, masks)
    tokens = np.argmax(penalised, axis=1)
    random = [row for row, work in enumerate(works) if work.sampling.temperature >= GREEDY_BELOW]
    if random:
        drawing = [works[row] for row in random]
        tokens[random] = _draw(_filtered(penalised[random], [work.sampling for work in drawing]), drawing)
    logprobs = _logprobs(logits, tokens, works)
    return [
        Drawn(token, error=masks.failed[work.sequence])
        if work.sequence in masks.failed
        else Drawn(token, logprobs.get(row))
        for row, (token, work) in enumerate(zip(tokens.tolist(), works, strict=True))
    ]


def _logprobs(logits: Array, tokens: Array, works: Sequence[Work]) -> dict[int, TokenLogprob]:
    """Return the log-probabilities of the rows that ask for them, by row, of their drawn `tokens`."""
    rows = [row for row, work in enumerate(works) if work.sampling.logprobs >= 0]
    if not rows:
        return {}
    counts = [works[row].sampling.logprobs for row in rows]
    scores = score(logits[rows], tokens[rows], max(counts))
    logprobs, top, top_logprobs = (one.tolist() for one in scores)
    return {
        row: TokenLogprob(logprobs[at], pack_tokens(top[at][:count]), tuple(top_logprobs[at][:count]))
        for at, (row, count) in enumerate(zip(rows, counts, strict=True))
    }


def _biased(logits: Array, works: Sequence[Work]) -> Array:
    """Return a copy with biases added to some tokens' logits, or the logits themselves if no row has a bias."""
    rows = [row for row, work in enumerate(works) if work.sampling.logit_bias]
    if not rows:
        return logits
    biased = logits.copy()
    for row in rows:
        tokens, biases = zip(*works[row].sampling.logit_bias, strict=True)
        biased[row, list(tokens)] += np.array(biases, np.float32)
    return biased


def _penalised(logits: Array, works: Sequence[Work]) -> Array:
    """Return a copy with penalties, or the logits themselves if no row has any.

    Tokens are counted from the history at each step: tens of µs for some thousand tokens, and only with penalties.
    """
    rows = [row for row, work in enumerate(works) if has_penalty(work.sampling)]
    if not rows:
        return logits
    penalised = logits.copy()
    for row in rows:
        work, sampling = works[row], works[row].sampling
        history = np.asarray(work.history, np.int64)
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(history)
            scores, factor = penalised[row, seen].astype(np.float64), sampling.repetition_penalty
            with np.errstate(over="ignore"):  # any factor above 0 is allowed; the result is clipped below
                scores = np.where(scores > 0, scores / factor, scores * factor)
            penalised[row, seen] = np.clip(scores, -_LOGIT_LIMIT, _LOGIT_LIMIT)
        produced, counts = np.unique(history[work.prompt_tokens :], return_counts=True)
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
        penalised[row, produced] -= penalty.astype(np.float32)
    return penalised


def _masked(logits: Array, works: Sequence[Work], masks: Masks) -> Array:
    """Return a copy in which masked tokens have no weight, or the logits themselves if no row has a mask.

    Only masks of grammars and of allowed tokens are as long as the vocabulary.
    """
    vocab = logits.shape[1]
    held = [row for row, work in enumerate(works) if work.sequence in masks.allowed or work.sampling.allowed_tokens]
    barred = [
        (row, token)
        for row, work in enumerate(works)
        if row not in held and len(work.barred_now) < vocab
        for token in work.barred_now
    ]
    if not held and not barred:
        return logits
    masked = logits.copy()
    if held:
        allowed = np.stack([allowed_now(works[row], masks, vocab) for row in held])
        masked[held] = np.where(allowed, logits[held], np.float32(-np.inf))
    if barred:
        rows, tokens = np.array(barred, np.int64).T
        masked[rows, tokens] = np.float32(-np.inf)
    return masked


def allowed_now(work: Work, masks: Masks, vocab: int) -> NDArray[np.bool_]:
    """Return which tokens a row may draw, at least one: of those that its grammar allows, those that its request
    allows, and of these those that it may draw now."""
    allowed = masks.allowed.get(work.sequence)
    if work.sampling.allowed_tokens:
        named = np.zeros(vocab, np.bool_)
        named[np.asarray(token_array(work.sampling.allowed_tokens))] = True
        both = named if allowed is None else named & allowed
        allowed = both if allowed is None or both.any() else allowed
    assert allowed is not None, "the row has a mask"
    if not work.barred_now:
        return allowed
    left = allowed.copy()
    left[np.asarray(work.barred_now, np.int64)] = False
    return left if left.any() else allowed


def has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def is_plain(work: Work, vocab: int) -> bool:
    """Say whether a row needs only the greatest logit, or a draw from the model's distribution at some temperature.

    The GPU has a kernel of its own for these rows. Log-probabilities are another kernel's, for all rows.
    """
    sampling = work.sampling
    greedy = sampling.temperature < GREEDY_BELOW
    filtered = not greedy and (0 < sampling.top_k < vocab or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    masked = sampling.allowed_tokens or sampling.grammar or work.barred_now
    return not (filtered or sampling.logit_bias or has_penalty(sampling) or masked)


def _filtered(logits: Array, settings: Sequence[Sampling]) -> Array:
    """Return unnormalised probabilities (rows, vocab): 1 for the likeliest, 0 for removed tokens. Changes `logits`.

    Every filter keeps all tokens that tie with the last one it keeps, so that the order of equal logits never matters.
    """
    vocab = logits.shape[1]
    with np.errstate(over="ignore"):  # a logit out of float32's range has no weight
        logits -= logits.max(axis=1, keepdims=True)
        logits *= np.asarray([[1 / sampling.temperature] for sampling in settings], np.float32)
    rows = [row for row, sampling in enumerate(settings) if 0 < sampling.top_k < vocab]
    if rows:
        ranked = np.sort(logits[rows], axis=1)
        last = ranked[np.arange(len(rows)), [vocab - settings[row].top_k for row in rows]]
        logits[rows] = np.where(logits[rows] < last[:, None], np.float32(-np.inf), logits[rows])
    weights = np.exp(logits)
    rows = [row for row, sampling in enumerate(settings) if sampling.top_p < 1.0]
    if rows:
        weights[rows] = _nucleus(weights[rows], np.asarray([[settings[row].top_p] for row in rows]))
    rows = [row for row, sampling in enumerate(settings) if sampling.min_p > 0.0]
    if rows:
        least = np.asarray([[settings[row].min_p] for row in rows], np.float32)  # the greatest weight is 1
        weights[rows] = np.where(weights[rows] < least, np.float32(0), weights[rows])
    return weights


def _nucleus(weights: Array, top_p: Array) -> Array:
    """Keep the smallest set of likeliest tokens whose mass reaches each row's `top_p` (rows, 1)."""
    ranked = np.sort(weights, axis=1)
    mass = np.cumsum(ranked, axis=1, dtype=np.float64)
    removable = mass <= (1 - top_p) * mass[:, -1:]  # a prefix of the ascending order
    kept_from = np.minimum(removable.sum(axis=1), weights.shape[1] - 1)
    least = ranked[np.arange(weights.shape[0]), kept_from]
    return np.where(weights < least[:, None], np.float32(0), weights)


def _draw(weights: Array, works: Sequence[Work]) -> Array:
    """Draw a token for each row, in proportion to its weights."""
    seeds = np.asarray([work.sampling.seed for work in works], np.uint64)
    draws = np.asarray([work.draw_index for work in works], np.uint64)
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    total = mass[:, -1]
    # The target stays below the total even after rounding, so the first mass above it is that of a token with weight.
    target = np.minimum(uniform(seeds, draws) * total, np.nextafter(total, np.zeros_like(total)))
    return np.argmax(mass > target[:, None], axis=1)
