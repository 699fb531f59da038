"""Unknown fields are removed from a body wherever Structs are, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.protocol.chat import ChatRequest, decode_chat
from services.frontend.protocol.ignored_fields import (
    ITEMS_LIMIT,
    MORE,
    NAMES_LIMIT,
    ODD,
    IgnoredFields,
    without_unknown,
)
from services.frontend.protocol.messages import MESSAGES_LIMIT
from services.frontend.protocol.parts import PARTS_LIMIT
from shared.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "x"}]


def stripped(body: Any) -> tuple[Any, tuple[str, ...]]:
    ignored = IgnoredFields()
    return json.loads(without_unknown(json.dumps(body).encode(), ChatRequest, "", ignored)), tuple(ignored.names)


def test_a_field_is_removed_from_objects_in_lists_and_unions() -> None:
    parts = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 2
    body = {
        "messages": [{"role": "user", "content": parts, "id": 1}, *MESSAGES],
        "response_format": {"type": "json_object", "strict": True},
        "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}},
        "top_k": 1,
        "frobnicate": [],
    }
    kept, names = stripped(body)
    assert kept == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}, *MESSAGES],
        "response_format": {"type": "json_object"},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "top_k": 1,
    }
    assert names == (
        *("messages[].content[].cache_control", "messages[].id", "response_format.strict", "tool_choice.function.x"),
        "frobnicate",
    )


def test_what_is_not_a_struct_stays_byte_for_byte() -> None:
    schema = b'{ "x" : 1E2, "y":[1,{"z":123456789012345678901234567890}] }'
    body = b'{"a":1,"tools":[{"type":"function","function":{"name":"f","parameters":%b}}]}' % schema
    assert schema in without_unknown(body, ChatRequest, "", IgnoredFields())
    known = b' {"top_k" : 1 , "messages":[ ] }'
    assert without_unknown(known, ChatRequest, "", IgnoredFields()) == known.lstrip()


@pytest.mark.parametrize("body", [{"messages": 5}, {"messages": [1, None, []]}, {"response_format": {"type": "x"}}, []])
def test_a_value_of_a_wrong_type_is_left_for_the_decoder(body: Any) -> None:
    assert stripped(body) == (body, ())


def test_names_are_bounded_and_plain() -> None:
    _, names = stripped({f"field{number}": 1 for number in range(NAMES_LIMIT + 5)})
    assert names == (*(f"field{number}" for number in range(NAMES_LIMIT)), MORE)
    for odd in ("a\r\nX-Evil: 1", "ü", "x" * 200, "", "a,b"):
        assert stripped({odd: 1}) == ({}, (ODD,))


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)))
def test_other_fields_in_a_good_body_change_nothing(more: dict[str, Any]) -> None:
    more = {name: value for name, value in more.items() if name not in ChatRequest.__struct_fields__}
    body = {**more, "messages": MESSAGES}
    alone = decode_chat(json.dumps({"messages": MESSAGES}).encode())
    assert decode_chat(json.dumps(body).encode(), IgnoredFields()) == alone
    if more:
        with pytest.raises(InvalidRequest, match="unknown field"):
            decode_chat(json.dumps(body).encode())


def test_of_a_list_that_is_too_long_the_limit_is_named_and_not_its_unknown_fields() -> None:
    many = [{**MESSAGES[0], "y": 1}] * (MESSAGES_LIMIT + 7)
    for body in (
        {"messages": many},
        {"x": 1, "messages": many},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "y": 1}] * (PARTS_LIMIT + 7)}]},
    ):
        with pytest.raises(InvalidRequest, match=r"^messages(\[0\]\.content)?: Expected `array` of length <= 4096"):
            decode_chat(json.dumps(body).encode(), IgnoredFields())


def test_lists_within_their_limits_may_be_too_many() -> None:
    parts = [{"type": "text", "text": "", "y": 1}] * PARTS_LIMIT
    messages = [{"role": "user", "content": parts}] * (ITEMS_LIMIT // PARTS_LIMIT)
    with pytest.raises(InvalidRequest, match=r"^messages: more than 16384 messages, blocks and calls together"):
        decode_chat(json.dumps({"messages": messages}).encode(), IgnoredFields())
    assert len(decode_chat(json.dumps({"messages": messages[1:]}).encode(), IgnoredFields()).messages) == 3
