from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.size.chat_stream import LINE_LIMIT_BYTES, ChatStream
from shared.errors import ProtocolError


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


STREAM = (
    b": a comment\r\nevent: message\r\n"
    + event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    + event(**delta("grüße"))
    + event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])
    + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
    + b"data: [DONE]\n\n"
)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_wherever_the_bytes_are_cut_the_events_are_the_same(cuts: list[int]) -> None:
    events = ChatStream()
    edges = [0, *sorted(cuts), len(STREAM)]
    texts = sum(events.feed(STREAM[start:end]) for start, end in pairwise(edges))
    assert texts == events.texts == 2
    assert events.finished
    assert events.usage is not None
    assert (events.usage.prompt_tokens, events.usage.completion_tokens) == (7, 2)


@pytest.mark.parametrize(
    "bad", [b"<html>\n", b"data: {\n", b"data: []\n", b'data: {"choices": 1}\n', b"data: \xff\n", b"data:\n"]
)
def test_what_is_no_stream_of_chunks_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChatStream().feed(bad)


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ChatStream().feed(b"data: " + b"x" * LINE_LIMIT_BYTES)


@pytest.mark.parametrize("error", [{"message": "it broke", "code": 500}, "it broke"])
def test_an_error_in_the_stream_is_reported(error: object) -> None:
    events = ChatStream()
    events.feed(event(error=error))
    assert events.error == "it broke"
    assert not events.finished


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b'event: error\ndata: {"message": "the engine died"}\n\n', "the engine died"),
        (b"event: error\n\n", "an event named error"),
        (event(object="error", message="out of memory", code=500), "out of memory"),
        (event(error={}), "an error"),
        (event(choices=[{"delta": {}, "finish_reason": "abort"}]), "finish reason abort"),
        (event(choices=[{"text": "half", "finish_reason": "error"}]), "finish reason error"),
    ],
)
def test_an_answer_that_its_server_gave_up_is_no_success_however_that_is_said(sent: bytes, said: str) -> None:
    events = ChatStream()
    events.feed(event(**delta("half an")) + sent + b"data: [DONE]\n\n")
    assert events.error == said


@pytest.mark.parametrize(
    "output",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"content": None, "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_thoughts_and_calls_are_tokens_too_by_whichever_name_and_a_role_is_none(output: dict[str, object]) -> None:
    events = ChatStream()
    assert events.feed(event(choices=[{"delta": {"role": "assistant", "content": ""}}])) == 0
    assert events.feed(event(choices=[{"delta": {"role": "assistant", **output}}])) == 1
