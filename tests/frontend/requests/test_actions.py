"""What is noted of a request at its frontend."""

from __future__ import annotations

from services.frontend.requests.actions import CountLoss, RetryLater, failure_note, loss_note, no_worker_note
from shared.errors import InvalidRequest, Overloaded


def test_a_lost_attempt_names_its_worker_and_what_is_kept() -> None:
    action = CountLoss("gone", had_tokens=True, attempt=1, why="the worker is gone")
    assert loss_note(action, "w1", 12) == "lost at w1 (gone), after 12 tokens, which are kept: the worker is gone"
    assert loss_note(action, "", 0) == "lost at no worker (gone): the worker is gone"


def test_a_request_without_a_worker_says_when_it_is_tried_again() -> None:
    assert "in about 0.1 s: none is ready" in no_worker_note(RetryLater(2, 0.1, "none is ready"))


def test_an_error_has_its_status_and_a_fault_of_the_request_none_of_its_words() -> None:
    assert failure_note(Overloaded("too many")) == "ended with status 429: too many"
    at_fault = InvalidRequest("'my secret' is not a number", param="top_k", code="bad")
    assert failure_note(at_fault) == "refused with status 400: top_k, bad"
    assert failure_note(InvalidRequest("my secret")) == "refused with status 400: the request is at fault"
