"""Lines, added up as a client does, are the answer; and how the text was cut into deltas changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.ollama.answers import OllamaWriter
from services.frontend.output.output import Delta
from services.frontend.protocol.chat_chunks import usage_of
from services.frontend.protocol.foreign import Ended
from services.frontend.requests.stream import join_deltas
from services.frontend.tool_parsers.parser import FormatName, ParsePlan
from tests.frontend.pieces import ANSWERS, CALL, parsed

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)


def ended(finish: str = "stop") -> Ended:
    return Ended(finish, "", usage_of(7, 5, 3), 2, 9, 1.5, 0.5, 0.25)


def new_writer(*, is_chat: bool) -> OllamaWriter:
    return OllamaWriter("tiny", is_chat=is_chat, now=lambda: NOW)


def folded(deltas: Sequence[Delta], end: Ended, draw: Random, *, is_chat: bool) -> dict[str, Any]:
    """The answer that a client adds up of lines; `draw` says which of them take the fast path."""
    writer = new_writer(is_chat=is_chat)
    lines = writer.first_events(end.usage)
    for delta in deltas:
        line = writer.continuation(delta)
        if line is not None and draw.random() < 0.5:
            writer.continued(delta)
            lines.append(line)
        else:
            pushed = writer.push(delta)
            assert line is None or pushed == [line]
            lines += pushed
    lines += writer.last_events(end)
    *begun, last = map(msgspec.json.decode, lines)
    assert [line["done"] for line in begun] == [False] * len(begun)
    key = "content" if is_chat else "response"
    whole: dict[str, Any] = {"thinking": "", "tool_calls": [], key: ""}
    for line in [*begun, last]:
        assert (line["model"], line["created_at"]) == ("tiny", "2026-01-02T03:04:05.000678Z")
        said = line["message"] if is_chat else line
        for field in whole:
            whole[field] += said.get(field, type(whole[field])())
    message = {field: value for field, value in whole.items() if value or field == key}
    added = {"message": {"role": "assistant", **message}} if is_chat else message
    return {**last, **added}


@given(
    st.sampled_from(ANSWERS),
    st.lists(st.integers(0, 300), max_size=12),
    st.booleans(),
    st.sampled_from(["hermes", None]),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_lines_add_up_to_the_whole_answer_wherever_it_is_cut(
    text: str, cuts: list[int], thinks: bool, calls: FormatName | None, finish: str, draw: Random, is_chat: bool
) -> None:
    plan, end = ParsePlan(calls, thinks), ended(finish)
    body = new_writer(is_chat=is_chat).full_body(join_deltas(parsed(text, (), plan)), end)
    assert folded(parsed(text, cuts, plan), end, draw, is_chat=is_chat) == msgspec.json.decode(body)


def test_calls_have_their_arguments_as_an_object_and_the_end_has_times_in_nanoseconds() -> None:
    deltas = parsed(f"<think>hm</think>I look.\n{CALL}", (), ParsePlan("hermes", True))
    body = new_writer(is_chat=True).full_body(join_deltas(deltas), ended("tool_calls"))
    function = {"index": 0, "name": "weather", "arguments": {"city": "Zürich 🚰"}}
    assert msgspec.json.decode(body) == {
        "model": "tiny",
        "created_at": "2026-01-02T03:04:05.000678Z",
        "message": {
            "role": "assistant",
            "content": "I look.\n",
            "thinking": "hm",
            "tool_calls": [{"id": "call_a", "function": function}],
        },
        "done": True,
        "done_reason": "stop",
        "total_duration": 1_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 5,
        "eval_duration": 250_000_000,
    }


def test_no_duration_is_zero_and_all_of_them_are_in_the_whole() -> None:
    for times in ((0.0, 0.0, 0.0), (1e-7, 5e-8, 5e-8), (0.3, 0.2, 0.1)):
        last = msgspec.json.decode(
            new_writer(is_chat=True).last_events(Ended("stop", "", usage_of(7, 1, 3), 0, 9, *times))[0]
        )
        assert last["prompt_eval_duration"] > 0 < last["eval_duration"]
        assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_reason_of_the_end(finish: str) -> None:
    body = new_writer(is_chat=False).full_body(Delta("x"), ended(finish))
    assert msgspec.json.decode(body)["done_reason"] == finish
