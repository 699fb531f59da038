"""Events, added up as a client does, are the message; and how the text was cut into deltas changes nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.anthropic.writer import MessageWriter, error_body
from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import usage_of
from services.frontend.protocol.foreign import Ended
from services.frontend.requests.stream import join_deltas
from services.frontend.tool_parsers.parser import FormatName, ParsePlan
from tests.frontend.pieces import ANSWERS, CALL, parsed

USAGE = usage_of(7, 5, 3)


def ended(finish: str = "stop", stop_string: str = "") -> Ended:
    return Ended(finish, stop_string, USAGE, 2, 9, 1.0, 0.5, 0.25)


def streamed(deltas: Sequence[Delta], end: Ended, directly: Callable[[], bool] = lambda: True) -> list[dict[str, Any]]:
    """The events; `directly`: whether a delta may take the fast path, as for a client that reads."""
    writer = MessageWriter("msg_1", "tiny")
    events = writer.first_events(USAGE)
    for delta in deltas:
        event = writer.continuation(delta) if len(events) > 2 else None
        assert event is None or writer.continuation(delta) == event, "nothing has changed"
        if event is not None and directly():
            writer.continued(delta)
            events.append(event)
        else:
            pushed = writer.push(delta)
            assert event is None or pushed == [event]
            events += pushed
    events += writer.last_events(end)
    return [msgspec.json.decode(event) for event in events]


def folded(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client adds up. A call that was cut off has a text as its input."""
    message: dict[str, Any] = {}
    opened: int | None = None
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == opened
                assert opened is not None
                block, delta = message["content"][opened], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    assert field == block["type"]
                    block[field] += delta[field]
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
            case "message_delta":
                assert opened is None
                message |= event["delta"] | {"usage": event["usage"]}
    for at, text in inputs.items():
        try:
            message["content"][at]["input"] = json.loads(text)
        except ValueError:
            message["content"][at]["input"] = text
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


@given(
    st.sampled_from(ANSWERS),
    st.lists(st.integers(0, 300), max_size=12),
    st.booleans(),
    st.sampled_from(["hermes", None]),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.randoms(use_true_random=False),
)
def test_events_add_up_to_the_whole_message_wherever_it_is_cut(
    text: str, cuts: list[int], thinks: bool, calls: FormatName | None, finish: str, draw: Random
) -> None:
    plan, end = ParsePlan(calls, thinks), ended(finish)
    deltas = parsed(text, cuts, plan)
    body = MessageWriter("msg_1", "tiny").full_body(join_deltas(parsed(text, (), plan)), end)
    message = folded(streamed(deltas, end, lambda: draw.random() < 0.5))
    complete = [block for block in message["content"] if not isinstance(block.get("input"), str)]
    assert message | {"content": complete} == msgspec.json.decode(body)


def test_thinking_text_and_calls_are_blocks_in_their_order() -> None:
    deltas = parsed(f"<think>hm</think>I look.\n{CALL}\nand then", (), ParsePlan("hermes", True))
    message = folded(streamed(deltas, ended("tool_calls")))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look.\n"},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Zürich 🚰"}},
        {"type": "text", "text": "and then"},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def test_a_call_that_was_cut_off_is_left_out_of_a_whole_message() -> None:
    deltas = parsed(
        'I look.<tool_call>{"name": "weather", "arguments": {"city": "cut o', (), ParsePlan("hermes", False)
    )
    body = MessageWriter("msg_1", "tiny").full_body(join_deltas(deltas), ended("length"))
    message = msgspec.json.decode(body)
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "max_tokens"


def test_a_call_that_the_model_did_not_finish_asks_for_no_result() -> None:
    begun = '<tool_call>{"name": "weather", "arguments": {"city": "cut o'
    for written, reason in ((begun, "end_turn"), (f"{CALL}{begun}", "tool_use")):
        deltas, end = parsed(written, (70, 110, 130, 150), ParsePlan("hermes", False)), ended("tool_calls")
        whole = msgspec.json.decode(MessageWriter("msg_1", "tiny").full_body(join_deltas(deltas), end))
        assert whole["stop_reason"] == folded(streamed(deltas, end))["stop_reason"] == reason


@pytest.mark.parametrize(
    ("finish", "stop_string", "expected"),
    [
        ("stop", "", ("end_turn", None)),
        ("stop", "\n\n", ("stop_sequence", "\n\n")),
        ("length", "", ("max_tokens", None)),
        ("tool_calls", "", ("tool_use", None)),
    ],
)
def test_the_reason_of_the_end_and_the_usage(finish: str, stop_string: str, expected: tuple[str, str | None]) -> None:
    message = folded(streamed([Delta("x")], ended(finish, stop_string)))
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["usage"] == {
        "input_tokens": 4,
        "output_tokens": 5,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_classes(status: int, kind: str) -> None:
    assert msgspec.json.decode(error_body(status, "why")) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
    }
