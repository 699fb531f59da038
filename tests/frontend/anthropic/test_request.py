"""Bodies of /v1/messages as chats: what each field becomes, what is ignored, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.frontend.anthropic.request import CountTokensRequest, MessagesRequest, as_chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.foreign import ThinkingSupport, name_here
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.messages import ChatMessage, messages_as_rendered
from services.frontend.protocol.structured import JsonSchemaFormat, NamedFunctionTool
from shared.errors import InvalidRequest
from tests.frontend.foreign import CITY, HELLO, PLAIN, WEATHER

THINKS = ThinkingSupport(thinks=True, reads=("enable_thinking", "reasoning_effort"))
CITY_JSON = '{"city":"Zürich"}'
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Zürich"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "warm"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def chat(support: ThinkingSupport = PLAIN, /, **fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    body = {"model": "tiny", "max_tokens": 50, "messages": HELLO, **fields}
    ignored = IgnoredFields()
    asked, _ = as_chat(decode_body(MessagesRequest, msgspec.json.encode(body), ignored), support, ignored)
    return asked, tuple(ignored.names)


def refused(support: ThinkingSupport = PLAIN, /, **fields: Any) -> InvalidRequest:
    body = {"model": "tiny", "max_tokens": 50, "messages": HELLO, **fields}
    with pytest.raises(InvalidRequest) as wrong:
        as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), support, REFUSE)
    return wrong.value


def test_the_fields_of_sampling_are_a_chats() -> None:
    asked, ignored = chat(
        max_tokens=9, stream=True, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["\n\n", "end"]
    )
    assert (asked.model, asked.max_tokens, asked.stream) == ("tiny", 9, True)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop) == (0.5, 0.25, 3, ["\n\n", "end"])
    assert asked.messages == [ChatMessage("user", "hello")]
    assert ignored == ()


@pytest.mark.parametrize(
    "system", ["Be kind.\nBe brief.", [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]]
)
def test_a_system_prompt_is_a_text_or_blocks(system: Any) -> None:
    assert chat(system=system)[0].messages[0] == ChatMessage("system", "Be kind.\nBe brief.")


def test_all_blocks_of_a_request_together_are_bounded() -> None:
    texts = [{"type": "text", "text": "x"}] * 4096
    many = [{"role": "user", "content": texts}] * 3
    assert len(chat(messages=many)[0].messages) == 3
    result = {**RESULT, "content": texts}
    for more in ({"role": "user", "content": texts}, {"role": "user", "content": [result]}):
        wrong = refused(messages=[*many, more])
        assert str(wrong) == "messages: more than 16384 messages, blocks and calls together"


def test_claude_codes_line_for_its_bill_is_no_part_of_the_prompt() -> None:
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"}
    asked, ignored = chat(system=[bill, {"type": "text", "text": "Be kind."}])
    assert asked.messages[0] == ChatMessage("system", "Be kind.")
    assert ignored == ("system.x-anthropic-billing-header",)
    assert chat(system=[bill])[0].messages == [ChatMessage("user", "hello")]


def test_thinking_text_and_calls_of_a_turn_are_one_message_and_each_result_one_of_its_tool() -> None:
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "never read"},
        {"type": "text", "text": "I look."},
        USE,
        USE | {"id": "call_2", "input": {}},
    ]
    results = [
        RESULT,
        {
            "type": "tool_result",
            "tool_use_id": "call_2",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"type": "text", "text": "And now?"},
    ]
    asked, _ = chat(messages=[*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": results}])
    assert messages_as_rendered(asked.messages) == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": CITY_JSON}},
                {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "warm", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "a\nb", "tool_call_id": "call_2", "name": "weather"},
        {"role": "user", "content": "And now?"},
    ]


def test_the_last_turn_is_continued_if_it_is_the_assistants() -> None:
    thought, text = {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look"}
    continued: list[tuple[Any, str | None]] = [("I look", None), ([text], None), ([thought, text], "hm")]
    for content, reasoning in continued:
        asked, _ = chat(messages=[*HELLO, {"role": "assistant", "content": content}])
        assert asked.continue_final_message is True
        assert asked.messages[-1] == ChatMessage("assistant", "I look", reasoning_content=reasoning)
    assert chat()[0].continue_final_message is None
    for blocks, param, why in (
        ([text, USE], "messages[1].content[1]", "needs its tool_result"),
        ([thought], "messages[1].content", "no text at its end"),
    ):
        wrong = refused(messages=[*HELLO, {"role": "assistant", "content": blocks}])
        assert wrong.param == param
        assert why in str(wrong)


def test_tools_and_their_choice_are_a_chats() -> None:
    asked, _ = chat(tools=[WEATHER | {"strict": True, "type": "custom"}])
    assert asked.tools is not None
    function = asked.tools[0].function
    assert (function.name, function.description, function.parameters, function.strict) == (
        *("weather", "Tells the weather.", CITY, True),
    )
    for choice, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        asked, _ = chat(tools=[WEATHER], tool_choice={"type": choice})
        assert (asked.tool_choice, asked.parallel_tool_calls) == (expected, None)
    asked, _ = chat(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    assert isinstance(asked.tool_choice, NamedFunctionTool)
    assert (asked.tool_choice.function.name, asked.parallel_tool_calls) == ("weather", False)


def test_thinking_is_a_budget_and_the_templates_switch() -> None:
    asked, ignored = chat(THINKS, thinking={"type": "enabled", "budget_tokens": 40})
    assert (asked.thinking_token_budget, asked.chat_template_kwargs) == (40, {"enable_thinking": True})
    adaptive, _ = chat(THINKS, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert (adaptive.thinking_token_budget, adaptive.reasoning_effort) == (None, "xhigh")
    off, _ = chat(THINKS, thinking={"type": "disabled"})
    assert (off.reasoning_effort, off.chat_template_kwargs) == ("none", None)
    assert ignored == ()


def test_limits_of_thinking_are_ignored_for_a_model_that_does_not_think() -> None:
    asked, ignored = chat(thinking={"type": "enabled", "budget_tokens": 40}, output_config={"effort": "low"})
    assert (asked.thinking_token_budget, asked.reasoning_effort) == (None, None)
    assert ignored == ("thinking", "output_config.effort")


def test_a_schema_holds_the_answer() -> None:
    form = {"type": "json_schema", "schema": CITY}
    for fields in (
        {"output_config": {"format": form}},
        {"output_format": form},
        {"output_format": form, "output_config": {"format": form}},
    ):
        asked, ignored = chat(**fields)
        assert isinstance(asked.response_format, JsonSchemaFormat)
        assert asked.response_format.json_schema is not None
        assert (asked.response_format.json_schema.schema, ignored) == (CITY, ())
    with pytest.raises(InvalidRequest, match=r"^output_format: "):
        chat(output_format={**form, "schema": {}}, output_config={"format": form})


def test_errors_and_what_is_ignored_of_a_schema_have_the_name_that_the_client_wrote() -> None:
    form = {"type": "json_schema", "schema": CITY}
    for fields, name in (
        ({"output_format": form}, "output_format"),
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"output_format": form, "output_config": {"format": form}}, "output_config.format"),
    ):
        body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
        _, table = as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), PLAIN, REFUSE)
        assert name_here("response_format.json_schema.schema.format", table) == f"{name}.schema.format"


def test_fields_about_how_and_where_an_answer_is_made_are_ignored_and_named() -> None:
    more = {"speed": "fast", "inference_geo": "us", "container": "c", "mcp_servers": [{}], "fallbacks": "default"}
    assert set(chat(**more)[1]) == more.keys()
    assert chat(**dict.fromkeys(more))[1] == ("fallbacks",)


@pytest.mark.parametrize("name", ["thread", "compaction"])
def test_a_field_that_would_change_the_answer_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        chat(**{name: {"type": "x"}})


def test_hints_are_accepted_and_named() -> None:
    _, ignored = chat(
        system=[{"type": "text", "text": "x", **CACHED}],
        tools=[WEATHER | CACHED, WEATHER | {"name": "other"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "x", **CACHED}, {"type": "text", "text": "y"}]},
            {"role": "assistant", "content": [USE | {"caller": {"type": "direct"}}]},
            {"role": "user", "content": [RESULT | {"is_error": True}]},
        ],
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
    )
    assert set(ignored) == {
        *("system[].cache_control", "tools[].cache_control", "messages[].content[].cache_control"),
        *(
            "messages[].content[].caller",
            "messages[].content[].is_error",
            "metadata",
            "service_tier",
            "context_management",
        ),
    }
    assert chat(metadata=None, context_management={}, cache_control=None)[1] == ()


def test_unknown_fields_are_ignored_and_named_and_refused_in_strict_mode() -> None:
    blocks = [{"type": "text", "text": "x", "no_such_field": 1}]
    asked, ignored = chat(messages=[{"role": "user", "content": blocks}], also_unknown={})
    assert asked.messages == [ChatMessage("user", "x")]
    assert set(ignored) == {"messages[].content[].no_such_field", "also_unknown"}
    for strict in ({"metadata": {"user_id": "u"}}, {"output_config": {"effort": "low"}}):
        assert "not supported" in str(refused(**strict))


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": None}, "max_tokens", "Expected `int`"),
        ({"no_such_field": 1}, "no_such_field", "unknown field"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "two tools"),
        ({"tools": [WEATHER | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type", "must be 'object'"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name", "required field `name`"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "required field"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "needed"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name", "only allowed"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type", "images are not served"),
        ({"system": [{"type": "thinking", "thinking": "hm"}]}, "system[0].type", "only blocks of type text"),
        ({"system": [{"text": "x"}]}, "system[0].type", "missing required field `type`"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "between_tools"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(fields: dict[str, Any], param: str, why: str) -> None:
    wrong = refused(**fields)
    assert (wrong.param, wrong.status) == (param, 400)
    assert why in str(wrong)
    assert param in str(wrong)


def test_a_text_stands_for_an_image_or_a_document_in_a_result_and_what_was_found_is_text() -> None:
    blocks: list[Any] = [{"type": kind, "source": {"type": "base64", "data": "AA"}} for kind in ("image", "document")]
    found = {"type": "search_result", "source": "http://x", "title": "T", "content": [{"type": "text", "text": "a"}]}
    turns = [
        *(*HELLO, {"role": "assistant", "content": [USE]}),
        {"role": "user", "content": [RESULT | {"content": [*blocks, found]}]},
    ]
    asked, ignored = chat(messages=turns)
    not_shown = "not shown, because only text is read here"
    assert asked.messages[-1].content == f"[image: {not_shown}]\n[document: {not_shown}]\nT\nhttp://x\na"
    assert ignored == tuple(f"messages[].content[].content[].{kind}" for kind in ("image", "document"))
    assert refused(messages=turns).param == "messages[2].content[0].content[0].image"


@pytest.mark.parametrize(
    ("kind", "inside"),
    [*((kind, False) for kind in ("document", "search_result", "x")), ("x", True)],
)
def test_blocks_that_are_not_served_are_refused_by_their_type(kind: str, inside: bool) -> None:
    block: Any = {"type": kind, "source": {}}
    where = "messages[0].content[1].type"
    if inside:
        block, where = (
            RESULT | {"content": [{"type": "text", "text": "x"}, block]},
            "messages[0].content[1].content[1].type",
        )
    wrong = refused(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, block]}])
    assert wrong.param == where
    told = {"document": "files are not served"}
    assert told.get(kind, repr(kind)) in str(wrong)


@pytest.mark.parametrize(
    ("turns", "param", "why"),
    [
        ([("user", [USE])], "messages[0].content[0]", "role user has no such block"),
        ([("assistant", [USE]), ("assistant", [RESULT])], "messages[1].content[0]", "role assistant has no such block"),
        ([("system", [{"type": "thinking", "thinking": "hm"}])], "messages[0].content[0]", "role system"),
    ],
)
def test_blocks_stand_where_they_belong(turns: Any, param: str, why: str) -> None:
    wrong = refused(messages=[*({"role": role, "content": content} for role, content in turns), *HELLO])
    assert wrong.param == param
    assert why in str(wrong)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": {"error_code": "unavailable"}},
        {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1", "content": {"type": "web_fetch_result"}},
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": []},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": {}},
        {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {}},
        {"type": "container_upload", "file_id": "f"},
    ],
    ids=lambda block: block["type"],
)
def test_what_only_anthropic_can_read_of_a_former_answer_is_ignored_and_named(block: dict[str, Any]) -> None:
    said = [block, {"type": "text", "text": "Found.", "citations": [{"type": "web_search_result_location"}]}]
    turns = [*HELLO, {"role": "assistant", "content": said}, *HELLO]
    asked, ignored = chat(messages=turns)
    assert asked.messages[1] == ChatMessage("assistant", "Found.")
    assert ignored == (f"messages[].content[].{block['type']}", "messages[].content[].citations")
    assert refused(messages=turns).param == f"messages[1].content[0].{block['type']}"


def test_answers_of_any_server_go_on() -> None:
    texts: list[Any] = [
        *({"type": "text", "text": ""}, {"type": "thinking", "thinking": "hm", "signature": None}),
        {"type": "compaction", "content": "So far."},
    ]
    odd = [USE | {"id": "", "name": "functions.look", "input": given} for given in ('{"a": 1}', None, {"b": 2})]
    answers: list[Any] = [
        {"type": "tool_result", "tool_use_id": "", "content": content} for content in (None, list[Any]())
    ]
    seen = {"type": "tool_result", "tool_use_id": "", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    asked, ignored = chat(
        messages=[
            *({"role": "user", "content": ""}, {"role": "assistant", "content": []}),
            *({"role": "assistant", "content": [*texts, *odd]}, {"role": "user", "content": [*answers, seen]}),
        ]
    )
    rendered = messages_as_rendered(asked.messages)
    assert [(one["role"], one["content"]) for one in rendered] == [
        *(("user", ""), ("assistant", ""), ("assistant", "So far."), *[("tool", "")] * 3),
    ]
    assert [one["function"]["arguments"] for one in rendered[2]["tool_calls"]] == ['{"a": 1}', "", '{"b":2}']
    assert ignored == ("messages[].content[].content[].tool_reference",)


def test_a_budget_is_given_and_leaves_room_for_the_answer() -> None:
    assert refused(THINKS, thinking={"type": "enabled"}).param == "thinking.budget_tokens"
    assert "max_tokens, 50" in str(refused(THINKS, thinking={"type": "enabled", "budget_tokens": 50}))


def test_tokens_are_counted_without_fields_of_an_answer() -> None:
    body = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 99},
    }
    asked, _ = as_chat(decode_body(CountTokensRequest, msgspec.json.encode(body)), THINKS, REFUSE)
    assert asked.messages == [ChatMessage("user", "hello")]
    with pytest.raises(InvalidRequest, match="max_tokens"):
        decode_body(CountTokensRequest, msgspec.json.encode(body | {"max_tokens": 5}))
