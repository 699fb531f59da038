"""The body of a response request becomes an equivalent chat; every refusal is in `bad_bodies.py`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.frontend.protocol.chat import ChatRequest, decode_chat
from services.frontend.protocol.foreign import with_names
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import MESSAGES_LIMIT, ChatMessage
from services.frontend.protocol.responses_request import NAMES, ResponseRequest, as_chat, decode_response
from services.frontend.protocol.responses_tools import CalledTool
from shared.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def chat_of(**body: Any) -> ChatRequest:
    return as_chat(decode_response(json.dumps({"input": "hello", **body}).encode()), [])


def chat(**body: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": [{"role": "user", "content": "hello"}], **body}).encode())


@pytest.mark.parametrize(
    ("response", "same"),
    [
        ({}, {}),
        ({"max_output_tokens": 5, "stream": True}, {"max_completion_tokens": 5, "stream": True}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        (
            {"tools": [{"type": "function", "name": "a", "parameters": SCHEMA, "strict": True}]},
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": SCHEMA, "strict": True}}]},
        ),
        (
            {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": "a"}},
            {
                "tools": [{"type": "function", "function": {"name": "a"}}],
                "tool_choice": {"type": "function", "function": {"name": "a"}},
            },
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
    ],
)
def test_a_response_asks_for_what_a_chat_does(response: dict[str, Any], same: dict[str, Any]) -> None:
    assert msgspec.structs.replace(chat_of(**response), logprobs=None) == msgspec.structs.replace(
        chat(**same), logprobs=None
    )
    assert bool(chat_of(**response).logprobs) == bool(chat(**same).logprobs)


def test_fields_with_the_same_name_are_copied() -> None:
    both = {
        "seed": 5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "stop": ["x"],
        "stop_token_ids": [7],
        "logit_bias": {"5": 1.0},
        "ignore_eos": True,
        "cache_salt": "a",
        "prompt_cache_key": "b",
        "priority": -2,
        "chat_template_kwargs": {"x": 1},
        "thinking_token_budget": 5,
        "deadline_s": 3.0,
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.5,
        "parallel_tool_calls": False,
    }
    assert msgspec.structs.replace(chat_of(**both), logprobs=None) == chat(**both)
    alike = set(ResponseRequest.__struct_fields__) & set(ChatRequest.__struct_fields__)
    theirs = {"stream", "stream_options", "top_logprobs", "tools", "tool_choice"}
    harmless = {
        "metadata",
        "user",
        "safety_identifier",
        "service_tier",
        "store",
        "moderation",
        "prompt_cache_retention",
    }
    assert alike == set(both) | theirs | harmless, "what chat has got, a response's body has to say yes or no to"


def test_instructions_come_first_and_former_messages_before_the_input() -> None:
    asked = decode_response(json.dumps({"input": "and?", "instructions": "Be kind."}).encode())
    before = chat().messages
    assert [message.content for message in as_chat(asked, before).messages] == ["Be kind.", "hello", "and?"]


def test_a_conversation_has_no_more_messages_than_a_chat() -> None:
    before = [ChatMessage("user", "hello")] * MESSAGES_LIMIT
    asked = decode_response(json.dumps({"input": "and?", "instructions": "Be kind."}).encode())
    assert len(as_chat(asked, before[1:]).messages) == 1 + MESSAGES_LIMIT
    with pytest.raises(InvalidRequest, match="more than 4096 messages") as refused:
        as_chat(asked, before)
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("param", "here"),
    [
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools[3].function.parameters.type", "tools[3].parameters.type"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("messages[3].tool_calls", "input"),
        ("temperature", "temperature"),
    ],
)
def test_errors_about_the_chat_name_fields_of_the_response_request(param: str, here: str) -> None:
    found = with_names(InvalidRequest(f"{param}: is wrong", param=param, code="c", status=413), NAMES)
    assert (found.param, str(found), found.code, found.status) == (here, f"{here}: is wrong", "c", 413)


def test_items_add_tools_as_codex_sends_them() -> None:
    namespace = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
    first = {"type": "additional_tools", "role": "developer", "id": None, "tools": [namespace]}
    shown = {"type": "function", "name": "look", "description": "new"}
    later = {"type": "additional_tools", "role": "developer", "tools": [shown, namespace, {"type": "web_search"}]}
    said = [{"role": "user", "content": "hello"}]
    ignored = IgnoredFields()
    body = {"tools": [shown | {"description": "old"}], "input": [first, *said, later], "tool_choice": "auto"}
    asked = decode_response(json.dumps(body).encode(), ignored)
    assert [(tool.function.name, tool.function.description) for tool in asked.tools.offered] == [
        ("look", "new"),
        ("exec", None),
    ]
    assert list(asked.tools.called.items()) == [("exec", CalledTool("exec", "functions"))]
    assert [tool.name for tool in asked.tools.echoed] == ["look"]
    assert ignored.names == ("tools[].web_search",)
    assert [message.role for message in as_chat(asked, [], ignored).messages] == ["user"]
    bad = body | {"input": [*said, later | {"tools": [{"type": "function", "name": "a", "parameters": {"type": 1}}]}]}
    with pytest.raises(InvalidRequest) as raised:
        as_chat(decode_response(json.dumps(bad).encode(), ignored), [], ignored)
    assert raised.value.param == "input[1].tools[0].parameters.type"
