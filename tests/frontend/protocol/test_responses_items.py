"""Items of a conversation become the messages that templates read; every refusal is in `bad_bodies.py`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import CalledFunction, ChatMessage, check_message, messages_as_rendered
from services.frontend.protocol.responses_items import (
    IGNORED_ITEMS,
    InputItem,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputThought,
    ThoughtText,
    check_calls,
    decode_items,
    messages_of,
)
from shared.errors import InvalidRequest


def items(*given: dict[str, Any]) -> list[InputItem]:
    return decode_items([msgspec.Raw(json.dumps(one).encode()) for one in given])


def call(name: str, /) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "look", "arguments": '{"at": "it"}'}


def output(name: str, /, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "seen", **more}


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"role": "assistant", "content": "I look."}


def test_what_the_assistant_does_at_once_is_one_message() -> None:
    found = messages_of(items({"role": "user", "content": "hi"}, THOUGHT, SAID, call("a"), call("b"), output("a")))
    assert [message.role for message in found] == ["user", "assistant", "tool"]
    assert (found[1].reasoning_content, found[1].content) == ("hm", "I look.")
    assert [one.id for one in found[1].tool_calls or ()] == ["a", "b"]
    assert found[2].tool_call_id == "a"


def test_a_summary_that_comes_back_is_the_reasoning_unless_there_is_content() -> None:
    summary = {"summary": [{"type": "summary_text", "text": "in short"}]}
    alone = THOUGHT | summary | {"content": None}
    assert messages_of(items(alone, SAID))[0] == ChatMessage("assistant", "I look.", reasoning_content="in short")
    ignored = IgnoredFields()
    [both] = decode_items([msgspec.Raw(json.dumps(THOUGHT | summary).encode())], ignored)
    assert messages_of([both])[0].reasoning_content == "hm"
    assert ignored.names == ("input[].summary",)


def test_a_message_after_a_call_is_another_one_and_so_is_reasoning_after_a_message() -> None:
    found = messages_of(items(call("a"), SAID, THOUGHT, THOUGHT))
    assert [(one.content, one.reasoning_content, bool(one.tool_calls)) for one in found] == [
        *((None, None, True), ("I look.", None, False), (None, "hmhm", False)),
    ]


def test_parts_are_joined_and_fields_of_an_answer_that_come_back_are_ignored() -> None:
    texts: list[dict[str, Any]] = [
        {"type": "output_text", "text": text, "annotations": [], "logprobs": [], "parsed": None} for text in "ab"
    ]
    more = {"id": "msg_1", "status": "completed", "type": "message"}
    [found] = messages_of(items({"role": "assistant", "content": texts, **more}))
    assert found == ChatMessage("assistant", "ab")


def test_a_text_stands_for_an_image_that_a_tool_shows() -> None:
    shown = [{"type": "input_image", "image_url": "data:"}, {"type": "input_text", "text": "a"}]
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "x", "input": ""}
    results = [output("a") | {"output": shown}, output("b") | {"type": "custom_tool_call_output", "output": shown}]
    raw = [msgspec.Raw(json.dumps(one).encode()) for one in (call("a"), custom, *results)]
    ignored = IgnoredFields()
    found = messages_of(decode_items(raw, ignored))
    assert [one.content for one in found[1:]] == ["[image: not shown, because only text is read here]\na"] * 2
    assert ignored.names == ("input[].output[].input_image",)
    with pytest.raises(InvalidRequest, match="images are not served") as refused:
        items(call("a"), results[0])
    assert refused.value.param == "input[1].output[0].type"


def test_a_tools_name_goes_with_its_output() -> None:
    [_, found] = messages_of(items(call("a"), output("a", name="look")))
    assert found.name == "look"


def test_calls_and_outputs_are_paired_with_those_of_the_former_conversation() -> None:
    former = messages_of(items(call("a"), call("b"), output("a")))
    check_calls(former, items(output("b"), call("c"), output("c")))
    check_calls(former, items(output("a"), call("b"), output("b")))  # servers that number calls anew in each turn
    with pytest.raises(InvalidRequest) as refused:
        check_calls(former, items({"role": "user", "content": "x"}, output("d")))
    assert refused.value.param == "input[1].call_id"


@given(
    st.lists(
        st.one_of(
            st.builds(OutputThought, st.just("rs"), st.lists(st.builds(ThoughtText, st.text())), st.just("completed")),
            st.builds(OutputMessage, st.just("msg"), st.lists(st.builds(OutputText, st.text())), st.just("completed")),
            st.builds(OutputCall, *map(st.just, ("fc", "call", "look", "{}", "completed"))),
        ),
        max_size=6,
    )
)
def test_whatever_an_answer_was_can_be_kept_and_rendered(answer: list[OutputItem]) -> None:
    found = messages_of(answer)
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[ChatMessage]) == found
    for at, message in enumerate(found):
        check_message(message, f"messages[{at}]")
    assert len(messages_as_rendered(found)) == len(found)
    calls = [one for message in found for one in message.tool_calls or ()]
    assert len(calls) == sum(isinstance(item, OutputCall) for item in answer)


def test_a_refusal_a_phase_and_an_empty_answer_are_the_assistants() -> None:
    refusal = {"role": "assistant", "phase": "final_answer", "content": [{"type": "refusal", "refusal": "No."}]}
    ignored = IgnoredFields()
    given = [refusal | {"status": "incomplete", "id": "msg_x"}, {"role": "assistant", "content": None}, SAID]
    found = messages_of(decode_items([msgspec.Raw(json.dumps(one).encode()) for one in given], ignored))
    assert [one.content for one in found] == ["No.", "", "I look."]
    assert ignored.names == ("input[].phase",)


def test_calls_of_other_tools_of_a_client_are_calls_with_their_outputs() -> None:
    found = messages_of(
        items(
            {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "x", "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "done"}]},
            {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}, "id": "l"},
            {"type": "local_shell_call_output", "id": "b", "output": '{"output": "a.py"}'},
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py", "stderr": ""}]},
            {"type": "apply_patch_call", "call_id": "d", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "d", "status": "completed"},
            {"type": "mcp_call", "id": "e", "name": "find", "arguments": "{}", "output": "it", "server_label": "x"},
            {"type": "mcp_call", "id": "f", "name": "find", "arguments": "{}", "error": {"code": 1}},
        )
    )
    rendered = messages_as_rendered(found)
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in _calls(rendered)] == [
        *(("patch", '{"input":"x"}'), ("local_shell", '{"type":"exec","command":["ls"]}')),
        *(("shell", '{"commands":["ls"]}'), ("apply_patch", '{"type":"delete_file","path":"a"}')),
        *(("find", "{}"), ("find", "{}")),
    ]
    assert [one["content"] for one in rendered if one["role"] == "tool"] == [
        *("done", '{"output": "a.py"}', '[{"stdout": "a.py", "stderr": ""}]', "", "it", '{"code": 1}'),
    ]


def _calls(rendered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call for message in rendered for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("kind", IGNORED_ITEMS)
def test_items_that_only_another_server_can_read_are_ignored_and_named(kind: str) -> None:
    given: list[dict[str, Any]] = [
        {"type": kind, "id": "x", "status": "completed", "encrypted_content": "x", "action": {"a": [1]}},
        SAID,
    ]
    ignored = IgnoredFields()
    found = messages_of(decode_items([msgspec.Raw(json.dumps(one).encode()) for one in given], ignored))
    assert found == [ChatMessage("assistant", "I look.")]
    assert ignored.names == (f"input[].{kind}",)
    with pytest.raises(InvalidRequest) as refused:
        items(*given)
    assert refused.value.param == "input[0].type"


def test_text_that_is_no_json_is_the_arguments_of_a_call() -> None:
    broken = call("a") | {"arguments": '{"at": "i', "status": "incomplete", "name": "mcp.look"}
    [found] = messages_of(items(broken))
    assert [one.called for one in found.tool_calls or ()] == [CalledFunction("mcp.look", '{"at": "i')]
