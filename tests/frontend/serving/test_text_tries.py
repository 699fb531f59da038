"""services/frontend/serving/text_tries.py: what follows when a server gives no answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.serving.text_tries import BUSY, LOSSES_LISTED, TextFault, TextLoss, TextTries, fault_of

REFUSED, GONE = TextFault("refused", "answers 503", passes=True), TextFault("gone", "broke off")
FAR = TextFault("unreachable", "does not answer")


@pytest.mark.parametrize("status", [200, 201, 400, 403, 404, 413, 422, 500, 501])
def test_an_answer_passes_whatever_it_says(status: int) -> None:
    assert fault_of(status, "application/json") is None


@pytest.mark.parametrize(
    ("status", "kind", "loss", "passes"),
    [
        *((status, "application/json", "refused", True) for status in sorted(BUSY)),
        (401, "application/json", "refused", False),
        *((status, "", "senseless", False) for status in (101, 204, 205, 300, 302, 304, 308)),
        (200, "text/html", "senseless", False),
        (503, "text/html", "senseless", False),
    ],
)
def test_what_is_no_answer_is_named_and_only_that_of_a_busy_server_may_pass(
    status: int, kind: str, loss: TextLoss, passes: bool
) -> None:
    fault = fault_of(status, kind)
    assert fault is not None
    assert (fault.loss, fault.passes) == (loss, passes)
    assert str(status) in fault.why


def test_each_server_is_tried_once_and_no_more_often_than_is_allowed() -> None:
    tries = TextTries(2)
    tries.begin()
    assert tries.failed("a", FAR)
    assert list(tries.excluded) == ["a"]
    tries.begin()
    assert not tries.failed("b", REFUSED)
    assert tries.text("no server answers") == "no server answers; a does not answer; b answers 503"


def test_one_that_ended_the_connection_is_asked_once_more_if_no_other_is_left() -> None:
    tries = TextTries(9)
    for instance, fault in (("a", GONE), ("b", FAR)):
        tries.begin()
        assert tries.failed(instance, fault)
    assert tries.none_left()
    assert list(tries.excluded) == ["b"]
    tries.begin()
    assert tries.failed("a", GONE)
    assert not tries.none_left()
    assert sorted(tries.excluded) == ["a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((REFUSED, GONE, FAR)))), st.integers(1, 20))
def test_tries_end(faults: list[tuple[str, TextFault]], most: int) -> None:
    tries, lifted = TextTries(most), 0
    for number, (instance, fault) in enumerate(faults, 1):
        tries.begin()
        again = tries.failed(instance, fault)
        tries.validate()
        assert again == (number < most)
        if not again:
            break
        lifted += tries.none_left()
        tries.validate()
    assert lifted <= 3
    assert tries.text().count(";") < LOSSES_LISTED
