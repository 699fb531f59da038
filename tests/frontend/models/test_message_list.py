"""Each rule of a template, and what becomes of messages by it."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.message_list import DONE, TemplateRules, find_rules, fit, object_arguments
from services.frontend.protocol.messages import ChatMessage, messages_as_rendered
from shared.errors import InvalidRequest
from tests.frontend.strict_templates import BUNDLED, STRICT


def turn(role: str, content: str = "", /, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*ids: str, arguments: str = "{}") -> dict[str, Any]:
    return {
        "tool_calls": [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    }


def shown(messages: list[dict[str, Any]], **rules: bool) -> list[str]:
    return [f"{one['role'][0]}:{one['content']}" for one in fit(messages, TemplateRules(**rules))]


S, D, U, V, A, B = (
    *(turn("system", "s"), turn("system", "d"), turn("user", "u"), turn("user", "v")),
    *(turn("assistant", "a"), turn("assistant", "b")),
)
CALL, RESULT = turn("assistant", "", **calls("1")), turn("tool", "r", tool_call_id="1")


@pytest.mark.parametrize(
    ("rule", "messages", "found"),
    [
        ("one_system", [S, D, U, S], ["s:s\n\nd", "u:u", "s:s"]),
        ("system_in_user", [S, D, U, A, S], ["u:s\n\nd\n\nu", "a:a", "u:s"]),
        ("system_in_user", [S, A], ["u:s", "a:a"]),
        ("late_system_as_user", [S, U, A, D], ["s:s", "u:u", "a:a", "u:d"]),
        ("user_first", [S, A, U], ["s:s", "u:", "a:a", "u:u"]),
        ("user_first", [S, U], ["s:s", "u:u"]),
        ("some_user", [S], ["s:s", "u:"]),
        ("some_user", [A, U], ["a:a", "u:u"]),
        ("alternating", [U, V, A, B, U], ["u:u\n\nv", "a:a\n\nb", "u:u"]),
        ("alternating", [U, A, CALL, RESULT, RESULT], ["u:u", "a:a", "t:r", "t:r"]),
        ("answered_results", [U, CALL, V, RESULT], ["u:u", "a:", "t:r", f"a:{DONE}", "u:v"]),
        ("answered_results", [U, CALL, V], ["u:u", "a:", f"a:{DONE}", "u:v"]),
        ("no_empty_answers", [U, turn("assistant"), V, CALL], ["u:u", "u:v", "a:"]),
        ("calls_apart", [U, A | calls("1"), RESULT], ["u:u", "a:a", "a:None", "t:r"]),
    ],
)
def test_a_rule_changes_what_its_template_does_not_take(rule: str, messages: Any, found: list[str]) -> None:
    assert shown(messages, **{rule: True}) == found
    assert shown(messages) == [f"{one['role'][0]}:{one['content']}" for one in messages]


def test_calls_that_are_made_one_have_their_results_after_them() -> None:
    second, stranger = turn("tool", "q", tool_call_id="2"), turn("tool", "x", tool_call_id="9")
    found = fit([A | calls("1", "2", "3"), second, RESULT, stranger, U], TemplateRules(one_call=True))
    assert [(one["content"], [call["id"] for call in one.get("tool_calls", ())]) for one in found] == [
        *(("a", ["1"]), ("r", []), ("", ["2"]), ("q", []), ("", ["3"]), ("x", []), ("u", [])),
    ]


def test_texts_and_calls_of_neighbours_are_joined_and_so_is_their_thinking() -> None:
    thought = {"reasoning_content": "hm"}
    [_, found] = fit(
        [U, A | thought, B | calls("1") | thought, turn("assistant", **calls("2"))], TemplateRules(alternating=True)
    )
    assert (found["content"], found["reasoning_content"]) == ("a\n\nb", "hm\n\nhm")
    assert [call["id"] for call in found["tool_calls"]] == ["1", "2"]


def test_short_ids_follow_from_the_ids_alone_and_those_that_fit_stay() -> None:
    rules = TemplateRules(short_ids=True)
    [call, answered] = fit(
        [turn("assistant", **calls("toolu_1", "abcDEF123")), turn("tool", tool_call_id="toolu_1")], rules
    )
    first, second = (one["id"] for one in call["tool_calls"])
    assert first == answered["tool_call_id"] != "toolu_1"
    assert first.isalnum()
    assert (len(first), second) == (9, "abcDEF123")


def test_contents_are_parts_and_arguments_are_texts_for_templates_that_expect_them() -> None:
    [found] = fit(
        [turn("assistant", "a", **calls("1", arguments='{"a": '))],
        TemplateRules(content_parts=True, text_arguments=True),
    )
    assert found["content"] == [{"type": "text", "text": "a"}]
    assert found["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_messages_that_came_are_not_changed() -> None:
    messages = [S, D, U, A | calls("toolu_1", "2"), RESULT, V]
    before = json.dumps(messages)
    fit(messages, TemplateRules(**dict.fromkeys(TemplateRules.__struct_fields__, True)))
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(('{"a": {"b": [1]}}', {"a": {"b": [1]}}), ("", {}), ("null", {}), ("[1]", {}), ("7", {}), ('"x"', {})),
        *(('{"a": "cut o', {}), ('{"a": "line\nend"}', {"a": "line\nend"}), ('"{\\"a\\": 1}"', {"a": 1})),
        *((r'{"a": "C:\users\\x \d \u12 \u00e4"}', {"a": r"C:\users\x \d \u12 ä"}),),
        *((r'{"a": "\\\q\\" , "\"\\": "\\\\u12\u00e4"}', {"a": "\\\\q\\", '"\\': r"\\u12ä"}),),
        *(('{"a":' * 100_000, {}), ("9" * 5000, {}), ("no JSON", {})),
    ],
    ids=lambda text: str(text)[:12],
)
def test_arguments_are_an_object_whatever_the_model_wrote(text: str, found: dict[str, Any]) -> None:
    assert object_arguments(text) == found


ROLES = st.sampled_from([S, U, V, A, turn("assistant"), CALL, RESULT, turn("assistant", "a", **calls("1", "2"))])


@given(
    st.lists(ROLES, max_size=12), st.fixed_dictionaries(dict.fromkeys(TemplateRules.__struct_fields__, st.booleans()))
)
def test_no_rule_loses_a_text_a_call_or_a_result(messages: list[dict[str, Any]], rules: dict[str, bool]) -> None:
    found = fit(messages, TemplateRules(**rules))
    text = json.dumps([one["content"] for one in found])
    assert all(one["content"] in text for one in messages)
    for field in ("tool_calls",):
        assert sum(len(one.get(field, ())) for one in found) == sum(len(one.get(field, ())) for one in messages)
    called: set[str] = set()
    results = 0
    for one in messages:
        called |= {call["id"] for call in one.get("tool_calls", ())}
        results += one["role"] == "tool" and (one["tool_call_id"] in called or not rules["answered_results"])
    assert sum(one["role"] == "tool" for one in found) == results, "a result of no call is the user's"


def test_thousands_of_neighbours_become_one_with_each_text_once() -> None:
    """Each was joined to all before it; four megabytes took ten seconds."""
    texts = [f"{number:0>1000}" for number in range(4000)]
    assert shown([turn("user", text) for text in texts], alternating=True) == ["u:" + "\n\n".join(texts)]


TEMPLATES = {name: ChatTemplate(source, {"bos_token": "<s>"}) for name, source in {**STRICT, **BUNDLED}.items()}
FOUND = {
    "mistral_v3": "one_system late_system_as_user user_first alternating answered_results short_ids",
    "mistral_v7": "one_system late_system_as_user user_first alternating answered_results short_ids",
    "mistral_v11": "one_system late_system_as_user user_first alternating answered_results no_empty_answers short_ids",
    "gemma_3": "one_system late_system_as_user user_first alternating",
    "gemma_2": "system_in_user user_first alternating",
    "qwen_3_5": "one_system late_system_as_user some_user",
    "llama_3_1": "one_call",
    "deepseek_r1": "one_system late_system_as_user calls_apart text_arguments",
    "with_parts": "content_parts",
    "mistral": "some_user",
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "ask"}
SAID = {"role": "assistant", "content": "say"}


def calling(*ids: str, content: str | None = None, arguments: str = '{"at": "here"}') -> dict[str, Any]:
    functions = [{"name": "look", "arguments": arguments} for _ in ids]
    calls = [{"id": i, "type": "function", "function": one} for i, one in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "instructions alone": [{"role": "system", "content": "be"}],
    "instructions and a developer's": [
        {"role": "system", "content": "be"},
        {"role": "developer", "content": "dev"},
        USER,
    ],
    "a system message in the middle": [USER, SAID, {"role": "system", "content": "now"}, USER],
    "a system message at the end": [{"role": "system", "content": "be"}, USER, {"role": "system", "content": "now"}],
    "the assistant first": [{"role": "system", "content": "be"}, SAID, USER],
    "two questions": [USER, {"role": "user", "content": "more"}, SAID, USER],
    "two answers": [USER, SAID, {"role": "assistant", "content": "tell"}, USER],
    "an empty answer": [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "more"}],
    "an answer at the end": [USER, SAID],
    "a call": [USER, calling("call_1"), result("call_1", "seen"), SAID, USER],
    "a text, then a call": [USER, SAID, calling("call_1"), result("call_1", "seen"), SAID, USER],
    "a question after a result": [USER, calling("call_1"), result("call_1", "seen"), USER],
    "a question before the result": [
        USER,
        calling("call_1"),
        {"role": "user", "content": "more"},
        result("call_1", "seen"),
    ],
    "a system message after a result": [
        USER,
        calling("call_1"),
        result("call_1", "seen"),
        {"role": "system", "content": "n"},
    ],
    "a call without a result": [USER, calling("call_1"), {"role": "user", "content": "more"}],
    "a result without a call": [result("call_9", "seen"), USER],
    "two calls": [USER, calling("a", "b"), result("b", "second"), result("a", "first"), SAID],
    "three calls, and one result": [USER, calling("a", "b", "c"), result("b", "second"), USER],
    "a call cut off": [USER, calling("c", arguments='{"at": "he'), result("c", "not JSON"), USER],
    "a call of a list": [USER, calling("c", arguments="[1]"), result("c", "no object"), USER],
    "a text, and a call without arguments": [USER, calling("c", content="I look.", arguments=""), result("c", "seen")],
    "calls and empty texts only": [calling("c"), result("c", ""), {"role": "assistant", "content": ""}],
}
NO_CALLS = {"gemma_2", "gemma_3", "chatml"}
"""Templates without a place for calls; requests with calls are refused before they are rendered."""


def rendered(template: ChatTemplate, history: list[dict[str, Any]], tools: Any = ()) -> str:
    messages = messages_as_rendered(msgspec.convert(history, list[ChatMessage]))
    return template.render(fit(messages, template.rules), tools=tools)


def texts_of(history: list[dict[str, Any]]) -> list[str]:
    return [one["content"] for one in history if one.get("content") and not one.get("tool_calls")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_shows_its_rules(name: str) -> None:
    rules = TEMPLATES[name].rules
    assert [field for field in rules.__struct_fields__ if getattr(rules, field)] == FOUND.get(name, "").split()


@pytest.mark.parametrize(("name", "history"), [*product(TEMPLATES, HISTORIES)])
def test_every_template_takes_every_conversation_and_leaves_no_text_out(name: str, history: str) -> None:
    messages = HISTORIES[history]
    if name in NO_CALLS and any(one["role"] == "tool" or "tool_calls" in one for one in messages):
        return
    for tools in ((), (TOOL,)):
        if name == "llama_3_1" and tools and history == "instructions alone":
            continue  # in preprocess.py this is the case for the strictest rules
        prompt = rendered(TEMPLATES[name], messages, tools)
        assert [text for text in texts_of(messages) if text not in prompt] == []
        called = sum(len(one.get("tool_calls", ())) for one in messages)
        assert prompt.count("look") >= called


@pytest.mark.parametrize("name", ["hermes", "llama3", "smollm2", "chatml"])
def test_a_template_that_takes_everything_gets_it_as_it_came(name: str) -> None:
    for history in HISTORIES.values():
        if name == "chatml" and any("tool_calls" in one for one in history):
            continue
        messages = messages_as_rendered(msgspec.convert(history, list[ChatMessage]))
        kept = fit(messages, TEMPLATES[name].rules)
        assert [(one["role"], one["content"]) for one in kept] == [(one["role"], one["content"]) for one in messages]


def test_a_rule_that_does_not_help_is_not_kept() -> None:
    def refuse(_messages: object) -> str:
        raise InvalidRequest("no")

    assert find_rules(refuse) == find_rules(lambda _messages: "") == TemplateRules()
    assert find_rules(lambda messages: json.dumps(messages, default=str)) == TemplateRules()


def test_a_template_without_memory_for_a_trial_is_not_taken_for_strict() -> None:
    def too_large(_messages: object) -> str:
        try:
            raise MemoryError
        except MemoryError:
            raise InvalidRequest("failed") from None

    with pytest.raises(MemoryError):
        find_rules(too_large)


def test_messages_with_images_become_one_as_lists_of_parts() -> None:
    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    image = {"type": "image"}
    turns: list[dict[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image, part("what?")]},
        {"role": "user", "content": "and this?"},
        {"role": "user", "content": [image]},
    ]
    [user] = fit(turns, TemplateRules(system_in_user=True, alternating=True, content_parts=True))
    between = part("\n\n")
    assert user == {
        "role": "user",
        "content": [part("be brief"), between, image, part("what?"), between, part("and this?"), between, image],
    }
