"""Makes log-probabilities of prompts' tokens from the hidden states of a step.

    rows of a work      | start …                                     … | end
    rows that score     |  each whose next token is of the prompt, and has no log-probability yet
                           └─▶ in turns of bounded memory: logits ─▶ score ─▶ PromptLogprobs of all its rows

A row's logits are computed for its turn alone, so that a chunk of thousands of tokens never has all its logits at once.
Blocks hold keys and values, not logits. So the scheduler takes no block from the prefix cache that has a position which
is to score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.contracts.runner import Drawn, Work
from services.worker.native.linear import Array
from services.worker.native.sampler import NO_TOKEN
from shared.messages.frames import PromptLogprobs

ScoreTurn = Callable[[int, NDArray[np.int32], int], tuple[Array, Array, Array]]
"""Computes one turn. Its arguments are the first row of the step, the token after each row from there on, and how many
of the likeliest tokens to return; its result is that of `logprobs.score`."""


class ScoredRows(Struct, frozen=True):
    """Consecutive rows of one work in a step, each of which gives the log-probability of the token after it."""

    first_row: int
    """The first of these rows in the step, whose rows are those of all works in order."""
    first_token: int
    """The index in the prompt of the token after the first row."""
    tokens: NDArray[np.int32]
    """The token after each row."""
    count: int
    """How many of the likeliest tokens are asked for."""


def scored_rows(works: Sequence[Work]) -> list[ScoredRows]:
    """Return the rows that score, of each work that has any. Most steps have none."""
    scored: list[ScoredRows] = []
    row = 0
    for work in works:
        if work.sampling.prompt_logprobs >= 0 and (scoring := work.scoring):
            tokens = np.asarray(work.history[scoring.start + 1 : scoring.stop + 1], np.int32)
            first_row = row + scoring.start - work.start
            scored.append(ScoredRows(first_row, scoring.start + 1, tokens, work.sampling.prompt_logprobs))
        row += work.end - work.start
    return scored


def score_rows(rows: ScoredRows, most_rows: int, score_turn: ScoreTurn) -> PromptLogprobs | None:
    """Return the log-probabilities of these rows, in turns of at most `most_rows`. None if one is not finite."""
    turns = [
        score_turn(rows.first_row + done, rows.tokens[done : done + most_rows], rows.count)
        for done in range(0, len(rows.tokens), most_rows)
    ]
    logprobs, top, top_logprobs = (np.concatenate(one) for one in zip(*turns, strict=True))
    if not np.isfinite(logprobs).all():
        return None
    return PromptLogprobs(
        rows.first_token,
        logprobs.astype("<f4").tobytes(),
        top.astype("<u4").tobytes(),
        top_logprobs.astype("<f4").tobytes(),
    )


def with_prompt_logprobs(
    works: Sequence[Work], results: Sequence[Drawn | None], prompts: Sequence[PromptLogprobs | None]
) -> list[Drawn | None]:
    """Return the results of a step with log-probabilities of prompts, one for each work that scores, in order. None
    stands for numbers that are not finite: then the work's result is an error."""
    left = iter(prompts)
    return [_with_prompt(one, next(left)) if work.scoring else one for work, one in zip(works, results, strict=True)]


def _with_prompt(result: Drawn | None, prompt: PromptLogprobs | None) -> Drawn:
    if prompt is None:
        return NO_TOKEN
    return msgspec.structs.replace(Drawn(0) if result is None else result, prompt_logprobs=prompt)
