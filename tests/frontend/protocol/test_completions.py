"""Bodies of completions that are accepted, and what they become; every refusal is in `bad_bodies.py`."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.protocol import chat
from services.frontend.protocol.completions import CompletionRequest, decode_completion, prompts_of
from shared.errors import InvalidRequest


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "x", **fields}).encode())


def test_every_field_is_read_or_refused() -> None:
    """A field that is neither would be silently ignored; those that chats have too are in test_chat.py."""
    own = {*CompletionRequest.__struct_fields__} - {*chat.CommonFields.__struct_fields__}
    assert own == {"prompt", "logprobs", "echo", "suffix", "best_of"}


def test_best_of_one_is_accepted() -> None:
    assert completion(best_of=1).n is None
    assert completion(best_of=1, n=1).n == 1


def test_a_prompt_is_a_text_or_token_ids_or_there_are_several_with_their_places() -> None:
    assert prompts_of(completion(prompt="x")) == prompts_of(completion(prompt=["x"])) == [("prompt", "x")]
    assert prompts_of(completion(prompt=[[1, 2]])) == [("prompt", [1, 2])]
    assert prompts_of(completion(prompt=[1, 2])) == [("prompt", array("I", [1, 2]))]
    assert prompts_of(completion(prompt=["x", [1], "y"])) == [
        ("prompt[0]", "x"),
        ("prompt[1]", [1]),
        ("prompt[2]", "y"),
    ]


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_raise_anything_but_an_invalid_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_completion(body)
