"""Log probabilities of prompts, from what vLLM returns to pieces of a bounded size."""

from __future__ import annotations

import math

from msgspec import Struct

from services.worker.vllm.prompt_logprobs import LOWEST, prompt_pieces
from shared.hashing import token_array
from shared.messages.frames import PromptLogprobs


class Found(Struct):
    """What vLLM says of one token at one position."""

    logprob: float
    rank: int


def test_each_token_has_its_own_and_the_likeliest_by_rank() -> None:
    positions = [
        None,
        {7: Found(-4.0, 9), 3: Found(-1.0, 2), 5: Found(-0.5, 1)},
        {5: Found(-0.25, 1), 8: Found(-2.0, 2)},
    ]
    [piece] = prompt_pieces([1, 7, 5], positions, 2, 1 << 20)
    assert (piece.first, piece.count, piece.is_sound) == (1, 2, True)
    assert memoryview(piece.logprobs).cast("f").tolist() == [-4.0, -0.25]
    assert token_array(piece.top_tokens).tolist() == [5, 3, 5, 8]
    assert memoryview(piece.top_logprobs).cast("f").tolist() == [-0.5, -1.0, -0.25, -2.0]


def test_pieces_are_bounded_and_follow_one_another() -> None:
    positions = [None, *({token: Found(-token / 8, 1)} for token in range(1, 100))]
    pieces = list(prompt_pieces(range(100), positions, 1, 120))
    assert all(len(one.logprobs + one.top_tokens + one.top_logprobs) <= 120 for one in pieces)
    assert [one.first for one in pieces] == list(range(1, 100, 10))
    values = b"".join(one.logprobs for one in pieces)
    assert memoryview(values).cast("f").tolist() == [-token / 8 for token in range(1, 100)]


def test_a_prompt_of_one_token_has_none() -> None:
    assert not list(prompt_pieces([4], [None], 5, 1 << 20))


def test_numbers_that_are_not_finite_become_the_lowest() -> None:
    [piece] = prompt_pieces([1, 2], [None, {2: Found(-math.inf, 1)}], 0, 1 << 20)
    assert memoryview(piece.logprobs).cast("f").tolist() == [LOWEST]
    assert piece.top_tokens == b""


def test_what_is_known_is_cut_off() -> None:
    [piece] = prompt_pieces([1, 2, 3], [None, {2: Found(-1.0, 1)}, {3: Found(-2.0, 1)}], 1, 1 << 20)
    rest = piece.after(1)
    assert (rest.first, rest.count, rest.is_sound) == (2, 1, True)
    assert token_array(rest.top_tokens).tolist() == [3]


def test_lengths_that_disagree_are_unsound() -> None:
    good = bytes(4)
    for piece in (
        PromptLogprobs(0, good),
        PromptLogprobs(1, b""),
        PromptLogprobs(1, bytes(5)),
        PromptLogprobs(1, good, good),
        PromptLogprobs(1, bytes(8), good, good),
    ):
        assert not piece.is_sound
