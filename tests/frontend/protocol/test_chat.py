"""Bodies of chats that are accepted, and what they become; every refusal is in `bad_bodies.py`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.protocol import chat as chats
from services.frontend.protocol.chat import decode_chat
from services.frontend.protocol.decoding import advisory_fields, fields_not_built
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import messages_as_rendered
from services.frontend.protocol.text_plan import plan_of, sampling_of
from services.frontend.protocol.tools import DESCRIPTION_LIMIT_CHARACTERS
from shared.errors import InvalidRequest
from shared.messages.generate import Sampling

HELLO: Any = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> chats.ChatRequest:
    return chats.decode_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def test_a_limit_of_minus_one_is_none_and_a_tool_without_a_type_is_a_function() -> None:
    assert chats.token_limit(chat(max_tokens=-1)) == (None, "max_tokens")
    assert chats.token_limit(chat(max_completion_tokens=-1, max_tokens=-1)) == (None, "max_completion_tokens")
    assert (
        chat(tools=[{"function": {"name": "a"}}]).tools
        == chat(tools=[{"type": "function", "function": {"name": "a"}}]).tools
    )


def test_what_clients_add_to_a_message_is_not_decoded() -> None:
    left = {"parsed": [[]] * 3, "provider_specific_fields": {"a": {}}}
    [message] = chat(messages=[{"role": "assistant", "content": "x", **left}]).messages
    assert isinstance(message.parsed, msgspec.Raw)
    assert isinstance(message.provider_specific_fields, msgspec.Raw)
    assert json.loads(msgspec.json.encode(message)) == {"role": "assistant", "content": "x", **left}


def test_every_field_is_read_or_refused() -> None:
    """A field that is neither would be silently ignored."""
    harmless = {"user", "metadata", "safety_identifier"}
    read = {
        *("model", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "logprobs", "n"),
        *("top_logprobs", "prompt_cache_key", "cache_salt", "messages", "temperature", "top_p", "top_k"),
        *("min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
        *("stop_token_ids", "deadline_s", "tools", "parallel_tool_calls", "chat_template_kwargs"),
        *("tool_choice", "response_format", "structured_outputs", "logit_bias", "service_tier"),
        *("reasoning_effort", "thinking_token_budget", "enable_thinking", "min_tokens", "skip_special_tokens"),
        *("include_stop_str_in_output", "return_token_ids", "truncate_prompt_tokens", "add_generation_prompt"),
        *("continue_final_message", "priority", "allowed_token_ids", "add_special_tokens", "documents"),
        "return_tokens_as_token_ids",
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
    marked = fields_not_built(chats.ChatRequest).keys() | advisory_fields(chats.ChatRequest).keys()
    assert {*chats.ChatRequest.__struct_fields__} == read | harmless | marked


def test_a_field_that_only_names_the_client_may_be_anything() -> None:
    chat(metadata={"a": {"b": 1}}, user="x" * 999, safety_identifier=7)
    assert [chat(service_tier=tier).service_tier for tier in ("auto", "priority", None)] == ["auto", "priority", None]


EXPLICIT: dict[str, Any] = {
    **{"use_beam_search": False, "length_penalty": 1.0, "best_of": 1, "echo": False, "add_special_tokens": False},
    **{"add_generation_prompt": True, "continue_final_message": False, "skip_special_tokens": True, "priority": 0},
    **{"include_stop_str_in_output": False, "spaces_between_special_tokens": False, "ignore_eos": False, "n": 1},
    **{"truncation_side": "left", "allowed_token_ids": [], "bad_words": [], "logits_processors": [], "min_tokens": 0},
    **{"stop": [], "stop_token_ids": [], "logit_bias": {}, "tools": [], "tool_choice": "auto", "functions": []},
    **{"function_call": "auto", "logprobs": False, "top_logprobs": 0, "min_p": 0, "top_k": 0, "top_p": 1},
    **{"repetition_penalty": 1, "thinking_token_budget": -1, "documents": [], "modalities": ["text"], "seed": -1},
    **{"kv_transfer_params": {}, "mm_processor_kwargs": {}, "media_io_kwargs": {}, "chat_template_kwargs": {}},
    **{"store": False, "parallel_tool_calls": True, "stream": False, "response_format": {"type": "text"}},
    **{"frequency_penalty": 0, "presence_penalty": 0.0, "return_token_ids": False, "return_tokens_as_token_ids": False},
}
"""The defaults of OpenAI's and vLLM's fields."""


@pytest.mark.parametrize("name", EXPLICIT)
def test_a_default_may_be_sent_and_asks_for_nothing(name: str) -> None:
    asked = decode_chat(json.dumps({"messages": HELLO, name: EXPLICIT[name]}).encode())  # strict: nothing is ignored
    assert sampling_of(asked, plan_of(asked), 5, 77) == Sampling(5, seed=77)
    chat(**{name: None})


def test_a_role_that_only_a_template_knows_goes_to_the_template() -> None:
    assert messages_as_rendered(chat(messages=[{"role": "my-role", "content": "x"}]).messages) == [
        {"role": "my-role", "content": "x"}
    ]


def test_documents_and_any_json_are_variables_of_the_template() -> None:
    given = {"controls": {"length": ["long"]}, "xml_tools": [{"name": "a"}]}
    asked = chat(chat_template_kwargs=given, documents=[{"title": "a"}], enable_thinking=False)
    assert chats.template_kwargs(asked) == {**given, "documents": [{"title": "a"}], "enable_thinking": False}
    with pytest.raises(InvalidRequest, match=r"^documents: "):
        chats.template_kwargs(chat(chat_template_kwargs={"documents": []}, documents=[{"title": "a"}]))


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_ignored_and_named(stop: Any) -> None:
    ignored = IgnoredFields()
    asked = decode_chat(json.dumps({"messages": HELLO, "stop": stop}).encode(), ignored)
    assert (plan_of(asked).stops, ignored.names) == (("a",) if "a" in stop else (), ("stop",))


def test_text_parts_are_joined_and_names_are_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "name": "eve", "content": parts}, {"role": "assistant", "content": ""}])
    assert messages_as_rendered(request.messages) == [
        {"role": "user", "name": "eve", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


def test_an_answer_can_be_sent_back_with_its_empty_fields() -> None:
    answer: Any = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    chat(messages=[answer])


def test_calls_are_rendered_with_their_arguments_as_they_came() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": [1.5], "a": "ä"}'}}
    bare = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call, bare], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
        ]
    )
    called, answered, thought = messages_as_rendered(request.messages)
    assert called == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": [1.5], "a": "ä"}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }
    assert answered == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "7"}
    assert thought == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_a_tool_may_be_described_at_length_as_agents_do() -> None:
    """Claude Code's tool Workflow has 18,780 characters."""
    long = {"type": "function", "function": {"name": "f", "description": "x" * DESCRIPTION_LIMIT_CHARACTERS}}
    assert chat(tools=[long]).tools
    long["function"] = {"name": "f", "description": "x" * (DESCRIPTION_LIMIT_CHARACTERS + 1)}
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.description"):
        chat(tools=[long])
    assert DESCRIPTION_LIMIT_CHARACTERS > 6 * 18_780


def test_tools_are_rendered_as_they_were_given_and_not_at_all_with_tool_choice_none() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, None]}}, "required": ["a"]}
    full = {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema}}
    bare = {"type": "function", "function": {"name": "g-2_X", "strict": False}}
    request = chat(tools=[full, bare], tool_choice="auto", parallel_tool_calls=False)
    empty = {"type": "object", "properties": {}}
    assert chats.offered_tools(request) == [
        full,
        {"type": "function", "function": {"name": "g-2_X", "parameters": empty}},
    ]
    assert json.dumps(chats.offered_tools(request)[0]) == json.dumps(full), "in the order of its keys"
    assert chats.offered_tools(chat(tools=[full], tool_choice="none")) == chats.offered_tools(chat()) == []


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_raise_anything_but_an_invalid_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        chats.decode_chat(body)


TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


RELATED = {"stream_options": "stream", "top_logprobs": "logprobs", "max_tokens": "max_completion_tokens"}
"""The field that an error may name instead, because the two contradict each other."""


@given(st.sampled_from(chats.ChatRequest.__struct_fields__), JSON)
def test_any_value_of_any_field_is_accepted_or_refused_by_name(field: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    named = field
    try:
        chats.decode_chat(json.dumps(body).encode())
    except InvalidRequest as refusal:
        named = refusal.param or "nothing"
    assert named.startswith((field, RELATED.get(field, field)))
