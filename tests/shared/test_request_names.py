"""The names of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.request_names import NAME_DIGITS, bare_id, is_named, short_name

OWN = "0123456789abcdef0123456789abcdef"


@given(st.text("ab1-", max_size=40), st.sampled_from(["", "/0", "/127"]))
def test_a_short_name_is_the_beginning_of_our_own_part_and_never_the_clients(clients: str, choice: str) -> None:
    request = f"{clients}-{OWN}{choice}" if clients else OWN + choice
    assert short_name(request) == OWN[:NAME_DIGITS]
    assert is_named(request, short_name(request))


@pytest.mark.parametrize("name", ["", f"my-trial-{OWN}/2", f"my-trial-{OWN}", "my-trial", OWN[:NAME_DIGITS], OWN])
def test_a_request_is_named_by_each_of_its_parts(name: str) -> None:
    assert is_named(f"my-trial-{OWN}/2", name)


@pytest.mark.parametrize("name", ["my", "trial", OWN[: NAME_DIGITS - 1], OWN[1:], f"my-trial-{OWN}/1"])
def test_a_request_is_not_named_by_less(name: str) -> None:
    assert not is_named(f"my-trial-{OWN}/2", name)


@pytest.mark.parametrize("given_id", ["abc", ' "abc" ', "chatcmpl-abc", "cmpl-abc", "msg_abc", "resp_f1.abc"])
def test_the_id_of_an_answer_is_that_of_its_request(given_id: str) -> None:
    assert bare_id(given_id) == "abc"
