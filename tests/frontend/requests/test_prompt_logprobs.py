from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.requests.prompt_logprobs import DuePromptLogprobs
from shared.messages.frames import FinishReason, Part, PromptLogprobs


def logprobs(first: int, count: int) -> PromptLogprobs:
    """Each token's four bytes are its index."""
    return PromptLogprobs(first, b"".join(bytes([first + at]) * 4 for at in range(count)))


def part(tokens: int = 0, finish: FinishReason | None = None, brought: PromptLogprobs | None = None) -> Part:
    return Part("request", 1, 0, bytes(4 * tokens), finish, prompt_logprobs=brought)


def test_what_came_before_is_left_out_and_what_comes_too_early_is_not_taken() -> None:
    prompt = DuePromptLogprobs(5)
    assert prompt.receive(logprobs(1, 2)) == logprobs(1, 2)
    assert prompt.receive(logprobs(1, 2)) is None, "it brings nothing new"
    assert prompt.receive(logprobs(4, 1)) is None, "token 3 is missing"
    assert prompt.due == 3
    assert prompt.receive(logprobs(2, 4)) == logprobs(3, 3)
    assert prompt.due == 0


@pytest.mark.parametrize("late", [part(1), part(finish="stop"), part(finish="length"), part(brought=logprobs(2, 1))])
def test_a_token_an_end_and_later_ones_show_that_some_are_missing(late: Part) -> None:
    assert DuePromptLogprobs(5).lacks(late)
    assert not DuePromptLogprobs(0).lacks(late), "none are due"


@pytest.mark.parametrize("early", [part(), part(finish="error"), part(brought=logprobs(1, 1))])
def test_other_parts_show_nothing(early: Part) -> None:
    assert not DuePromptLogprobs(5).lacks(early)


@pytest.mark.parametrize("wrong", [logprobs(0, 1), logprobs(3, 4), PromptLogprobs(1, b"a")])
def test_those_before_token_1_or_after_the_prompt_and_broken_ones_are_not_sound(wrong: PromptLogprobs) -> None:
    assert not DuePromptLogprobs(5).is_sound(wrong)
    assert DuePromptLogprobs(5).is_sound(logprobs(3, 3))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9))))
@settings(max_examples=200)
def test_whatever_comes_each_is_passed_on_once_and_in_order(pieces: list[tuple[int, int]]) -> None:
    prompt, passed_on = DuePromptLogprobs(9), b""
    for first, count in pieces:
        brought = logprobs(first, min(count, 10 - first))
        assert prompt.is_sound(brought)
        new = prompt.receive(brought)
        passed_on += b"" if new is None else new.logprobs
        prompt.validate()
    assert passed_on == logprobs(1, 9 - prompt.due).logprobs
