"""What templates with the rules of well-known models make of any conversation."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import msgspec
import pytest

from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.message_list import TemplateRules, fit
from services.frontend.models.template_rules import find_rules
from services.frontend.protocol.messages import ChatMessage, messages_as_rendered
from shared.errors import InvalidRequest
from tests.frontend.strict_templates import BUNDLED, STRICT

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
