"""services/frontend/requests/retry.py: what is counted, and what is enough."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.requests.retry import (
    DEADLY,
    FIRST_PAUSE_S,
    GONE_EARLY,
    LONGEST_PAUSE_S,
    LOSSES_LISTED,
    NOT_ITS_FAULT,
    NOTHING_DONE,
    Loss,
    RetryBudget,
)


def test_the_attempt_that_is_one_too_many_in_a_row_is_enough() -> None:
    tries = RetryBudget(attempts=2)
    tries.attempt_started()
    assert tries.attempt_failed("senseless", 1, "w1", "nonsense") == ""
    tries.attempt_started()
    assert tries.attempt_failed("gap", 2, "w2", "a gap") == (
        "2 attempts in a row brought no token; attempt 1 at w1: nonsense; attempt 2 at w2: a gap"
    )


def test_attempts_that_are_gone_with_their_worker_before_a_token_are_counted_apart_and_bounded() -> None:
    tries = RetryBudget(attempts=2)
    for number in range(GONE_EARLY * 2):
        tries.attempt_started()
        assert tries.attempt_failed("gone", number, f"w{number % 3}", "the worker is gone") == ""
        tries.validate()
    tries.attempt_started()
    assert tries.attempt_failed("stalled", 8, "w", "no token came") == "", "the first fruitless one"
    tries.attempt_started()
    tries.token_received()
    assert tries.attempt_failed("gone", 9, "w", "the worker is gone") == "", "the first death"
    tries.attempt_started()
    assert tries.attempt_failed("gone", 10, "w", "the worker is gone").startswith(
        "9 attempts ended with their worker before they brought a token; "
    )


@pytest.mark.parametrize("loss", sorted(DEADLY - {"gone"}))
def test_an_engine_that_ends_before_a_token_counts_as_fruitless(loss: Loss) -> None:
    tries = RetryBudget(attempts=2)
    tries.attempt_started()
    assert tries.attempt_failed(loss, 1, "w1", "it died") == ""
    tries.attempt_started()
    assert tries.attempt_failed(loss, 2, "w2", "it died").startswith("2 attempts in a row brought no token")


@pytest.mark.parametrize("loss", sorted(DEADLY))
def test_deaths_count_though_each_attempt_brings_tokens_and_other_losses_do_not(loss: Loss) -> None:
    tries = RetryBudget(attempts=2)
    for number in range(5):
        tries.attempt_started()
        tries.token_received()
        assert tries.attempt_failed("gap", number, "w", "a gap") == ""
    for number, enough in enumerate((False, False, True)):
        tries.attempt_started()
        tries.token_received()
        assert bool(tries.attempt_failed(loss, number, "w", "it died")) == enough


def test_any_number_of_workers_may_hand_an_attempt_back_but_each_only_once() -> None:
    tries = RetryBudget(attempts=2)
    for number in range(20):
        tries.attempt_started()
        if number % 3 == 0:
            tries.token_received()
        assert tries.attempt_failed("handed_back", number, f"w{number}", "the worker is shutting down") == ""
        tries.validate()
    tries.attempt_started()
    assert tries.attempt_failed("handed_back", 20, "w1", "again") == ""
    tries.attempt_started()
    assert tries.attempt_failed("handed_back", 21, "w1", "and again").startswith("2 attempts in a row")


def test_only_overload_is_no_reason_to_wait() -> None:
    for loss in get_args(Loss):
        tries = RetryBudget()
        tries.attempt_started()
        tries.attempt_failed(loss, 1, "w1", "", overloaded=loss == "refused")
        assert tries.may_wait == (loss != "refused")
        assert ("w1" in tries.excluded) == (loss not in NOT_ITS_FAULT)


@given(st.data())
def test_any_history_is_bounded(data: st.DataObject) -> None:
    tries = RetryBudget(attempts=data.draw(st.integers(1, 4)), rescue_s=5.0)
    now_s = 0.0
    for number in range(data.draw(st.integers(1, 40))):
        tries.attempt_started()
        loss: Loss = data.draw(st.sampled_from([*get_args(Loss), "handed_back", *NOTHING_DONE]))
        if loss not in NOTHING_DONE and data.draw(st.booleans()):
            tries.token_received()
        enough = tries.attempt_failed(loss, number, data.draw(st.sampled_from("abc")), "why")
        tries.validate()
        assert tries.error_text("").count("attempt") <= LOSSES_LISTED
        if enough:
            return
        if tries.may_wait and data.draw(st.booleans()):
            now_s += tries.pause_s
            tries.pause_ended(now_s)
            assert FIRST_PAUSE_S <= tries.pause_s <= LONGEST_PAUSE_S
            tries.validate()
