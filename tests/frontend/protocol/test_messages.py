"""Messages that other servers' answers and older clients leave in a conversation, as templates read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.messages import CALLS_LIMIT, messages_as_rendered
from shared.errors import InvalidRequest

USER = {"role": "user", "content": "ask"}
CALLED = {"name": "look", "arguments": "{}"}


def rendered(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = json.dumps({"messages": messages}).encode()
    return messages_as_rendered(decode_chat(body, IgnoredFields()).messages)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (assistant(content=None, refusal="I cannot."), "I cannot."),
        (assistant(content=[{"type": "refusal", "refusal": "I cannot."}]), "I cannot."),
        (assistant(content="Yes.", refusal="But no."), "Yes.\nBut no."),
        (assistant(content=None), ""),
        (assistant(), ""),
        (assistant(content=[]), ""),
        (assistant(content="a", refusal=None, audio=None, function_call=None, tool_calls=None, annotations=[{}]), "a"),
        (assistant(content=None, audio={"id": "audio_1", "data": "AAAA", "transcript": "Hello."}), "Hello."),
        (assistant(content=[{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
        ({"role": "user", "content": [{"type": "text", "text": one} for one in ("a", "", "b")]}, "a\nb"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "a"),
    ],
)
def test_the_text_of_an_answer_is_all_that_was_said(message: dict[str, Any], text: str) -> None:
    assert rendered(USER, message)[-1] == {"role": message["role"], "content": text}


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a", "reasoning": "hm"},
        {"content": "a", "reasoning": "hm", "reasoning_content": None, "reasoning_details": [{"type": "x"}]},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "a"},
            ]
        },
    ],
)
def test_reasoning_of_other_servers_is_reasoning(fields: dict[str, Any]) -> None:
    assert rendered(USER, assistant(**fields))[-1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_calls_of_other_servers_may_have_any_name_and_no_id_and_their_results_none_either() -> None:
    calls = [{"function": CALLED}, {"id": "", "type": "", "function": CALLED | {"name": "functions.look:0"}}]
    found = rendered(
        *(USER, assistant(content="", tool_calls=calls)),
        *({"role": "tool", "content": None}, {"role": "tool", "content": "b", "name": "functions.look:0"}),
    )
    first, second = (call["id"] for call in found[1]["tool_calls"])
    assert first != second
    assert [(one["tool_call_id"], one["name"], one["content"]) for one in found[2:]] == [
        *((first, "look", ""), (second, "functions.look:0", "b")),
    ]
    with pytest.raises(InvalidRequest, match="no call without a result is before it"):
        rendered(USER, {"role": "tool", "content": "x"})


@pytest.mark.parametrize(("kind", "word"), [("image_url", "image"), ("input_image", "image"), ("file", "file")])
def test_a_text_stands_for_an_image_in_a_result_so_that_the_conversation_goes_on(kind: str, word: str) -> None:
    field = "image_url" if word == "image" else kind
    parts = [{"type": "text", "text": "Look:"}, {"type": kind, field: {"url": "data:image/png;base64,AAAA"}}]
    messages = [USER, assistant(tool_calls=[{"id": "c" * 2000, "function": CALLED}])]
    result = {"role": "tool", "tool_call_id": "c" * 2000, "content": parts}
    assert rendered(*messages, result)[-1]["content"] == f"Look:\n[{word}: not shown, because only text is read here]"
    ignored = IgnoredFields()
    decode_chat(json.dumps({"messages": [*messages, result]}).encode(), ignored)
    assert ignored.names == (f"messages[].content[].{kind}",)
    asked = [] if word == "image" else [(USER | {"content": parts}, ignored)]
    for body, by in ((result, REFUSE), (assistant(content=parts), ignored), *asked):
        with pytest.raises(InvalidRequest, match=r"are not served") as refused:
            decode_chat(json.dumps({"messages": [*messages, body]}).encode(), by)
        assert refused.value.param == "messages[2].content[1].type"


def test_a_repeated_id_means_the_latest_call() -> None:
    turns = [
        turn
        for name in ("look", "listen")
        for call in [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}]
        for turn in (assistant(tool_calls=[call]), {"role": "tool", "tool_call_id": "call_0", "content": "x"})
    ]
    found = rendered(USER, *turns)
    assert [one["name"] for one in found if one["role"] == "tool"] == ["look", "listen"]
    assert found[1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


def test_calls_of_the_former_form_and_of_custom_tools_are_calls() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    found = rendered(
        *(USER, assistant(content=None, function_call=CALLED), {"role": "function", "name": "look", "content": "seen"}),
        *(assistant(tool_calls=[custom]), {"role": "tool", "tool_call_id": "c", "content": "done"}),
    )
    [call], [patch] = found[1]["tool_calls"], found[3]["tool_calls"]
    assert call["function"] == CALLED
    assert (found[2]["role"], found[2]["tool_call_id"], found[2]["name"]) == ("tool", call["id"], "look")
    assert patch["function"] == {"name": "patch", "arguments": '{"input":"*** Begin"}'}


def test_results_without_ids_belong_to_the_oldest_calls_of_their_tools_among_thousands() -> None:
    """A result looked through all calls that waited; 44,000 took 17 seconds."""
    looks = [{"id": f"a{at}", "function": CALLED} for at in range(3000)]
    tells = [{"id": f"b{at}", "function": {"name": "tell", "arguments": "{}"}} for at in range(1000)]
    calls = [*looks, *tells]
    made = [assistant(tool_calls=calls[at : at + 100]) for at in range(0, len(calls), 100)]
    results = [{"role": "tool", "content": "x", "name": "tell"}] * 1000
    answered = [turn["tool_call_id"] for turn in rendered(USER, *made, *results) if turn["role"] == "tool"]
    assert answered == [f"b{at}" for at in range(1000)]


def test_the_calls_of_a_conversation_are_bounded() -> None:
    """Each is looked at one by one: 48,000 in 4 MiB held the event loop for a second."""
    calls = [{"function": CALLED}] * 128
    most = [assistant(tool_calls=calls)] * (CALLS_LIMIT // len(calls))
    assert sum(len(turn.get("tool_calls", ())) for turn in rendered(USER, *most)) == CALLS_LIMIT
    for more in (assistant(tool_calls=calls[:1]), assistant(function_call=CALLED)):
        with pytest.raises(InvalidRequest, match="more than 4096 calls in all messages") as wrong:
            rendered(USER, *most, more)
        assert wrong.value.param == f"messages[{len(most) + 1}].tool_calls"


def test_a_call_with_the_id_of_another_tools_takes_its_place() -> None:
    again = assistant(tool_calls=[{"id": "a", "function": {"name": "tell", "arguments": "{}"}}])
    first = assistant(tool_calls=[{"id": "a", "function": CALLED}])
    result = {"role": "tool", "content": "x", "name": "tell"}
    assert rendered(USER, first, again, result)[-1]["tool_call_id"] == "a"
    with pytest.raises(InvalidRequest, match="names no call"):
        rendered(USER, first, again, {**result, "name": "look"})
