"""What is noted of a request at its frontend."""

from __future__ import annotations

from services.frontend.requests.actions import CountLoss, RetryLater
from services.frontend.requests.request_notes import failed, lost, no_worker
from shared.errors import InvalidRequest, Overloaded


def test_a_lost_attempt_names_its_worker_and_what_is_kept() -> None:
    action = CountLoss("gone", had_tokens=True, attempt=1, why="the worker is gone")
    assert lost(action, "w1", 12) == "lost at w1 (gone), after 12 tokens, which are kept: the worker is gone"
    assert lost(action, "", 0) == "lost at no worker (gone): the worker is gone"


def test_a_request_without_a_worker_says_when_it_is_tried_again() -> None:
    assert "in about 0.1 s: none is ready" in no_worker(RetryLater(2, 0.1, "none is ready"))


def test_an_error_has_its_status_and_a_fault_of_the_request_none_of_its_words() -> None:
    assert failed(Overloaded("too many")) == "ended with status 429: too many"
    at_fault = InvalidRequest("'my secret' is not a number", param="top_k", code="bad")
    assert failed(at_fault) == "refused with status 400: top_k, bad"
    assert failed(InvalidRequest("my secret")) == "refused with status 400: the request is at fault"
