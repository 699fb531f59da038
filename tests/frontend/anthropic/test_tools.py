"""Tools of /v1/messages: which reach the model, with which schema, and which are ignored by their type."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.frontend.anthropic.request import MessagesRequest, as_chat
from services.frontend.anthropic.tools import OfferedTools, decode_tools
from services.frontend.protocol.decoding import decode_body
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.structured.grammar import answer_grammar
from services.frontend.tool_parsers.parser import ParsePlan
from shared.errors import InvalidRequest
from tests.frontend.foreign import HELLO, PLAIN, WEATHER

SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["a.example"]},
    {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "files"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1024, "display_height_px": 768},
    {"type": "of_tomorrow_20300101", "x": [1]},
]


def decoded(*tools: dict[str, Any], ignored: IgnoredFields | None = None) -> OfferedTools:
    return decode_tools([msgspec.Raw(json.dumps(tool).encode()) for tool in tools], ignored or IgnoredFields())


def parameters(kind: str, name: str, **more: Any) -> dict[str, Any]:
    [tool] = decoded({"type": kind, "name": name, **more}).offered
    assert tool.function.name == name
    assert tool.function.description
    assert tool.function.parameters is not None
    return tool.function.parameters


def test_tools_that_only_anthropic_runs_are_ignored_and_named() -> None:
    ignored = IgnoredFields()
    found = decoded(*SERVER_TOOLS, WEATHER, ignored=ignored)
    assert [tool.function.name for tool in found.offered] == ["weather"]
    assert found.places == ["tools[7]"]
    assert ignored.names == tuple(f"tools[].{tool['type']}" for tool in SERVER_TOOLS)


@pytest.mark.parametrize("tool", SERVER_TOOLS)
def test_the_strict_mode_refuses_them(tool: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="are not served") as refused:
        decoded(WEATHER, tool, ignored=IgnoredFields(refuse=True))
    assert refused.value.param == "tools[1].type"


def test_one_that_must_be_called_is_refused() -> None:
    choice = {"type": "tool", "name": "web_search"}
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, "tools": [*SERVER_TOOLS, WEATHER], "tool_choice": choice}
    with pytest.raises(InvalidRequest, match="'web_search' is not served") as refused:
        as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), PLAIN, IgnoredFields())
    assert refused.value.param == "tool_choice.name"


def test_a_call_of_tools_of_which_none_is_served_says_so() -> None:
    choice = {"type": "any"}
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, "tools": SERVER_TOOLS, "tool_choice": choice}
    asked, _ = as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), PLAIN, IgnoredFields())
    with pytest.raises(InvalidRequest, match="none of them is served") as refused:
        answer_grammar(asked, ParsePlan("hermes"), {})
    assert refused.value.param == "tool_choice"


def test_an_error_names_the_place_of_a_tool_after_ignored_ones() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, "tools": [*SERVER_TOOLS, WEATHER, WEATHER]}
    with pytest.raises(InvalidRequest, match="two tools") as refused:
        as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), PLAIN, IgnoredFields())
    assert refused.value.param == "tools[8].name"
    body["tools"] = [*SERVER_TOOLS, WEATHER | {"input_schema": {"type": "array"}}]
    with pytest.raises(InvalidRequest, match="must be 'object'") as refused:
        as_chat(decode_body(MessagesRequest, msgspec.json.encode(body)), PLAIN, IgnoredFields())
    assert refused.value.param == "tools[7].input_schema.type"


@pytest.mark.parametrize("version", ["20241022", "20250124", "20991231"])
def test_bash_reaches_the_model_with_its_schema(version: str) -> None:
    schema = parameters(f"bash_{version}", "bash", cache_control={"type": "ephemeral"})
    assert set(schema["properties"]) == {"command", "restart"}


@pytest.mark.parametrize(
    ("version", "name", "undoes"),
    [
        ("20241022", "str_replace_editor", True),
        ("20250124", "str_replace_editor", True),
        ("20250429", "str_replace_based_edit_tool", False),
        ("20250728", "str_replace_based_edit_tool", False),
    ],
)
def test_the_text_editor_reaches_the_model_with_the_schema_of_its_version(
    version: str, name: str, undoes: bool
) -> None:
    schema = parameters(f"text_editor_{version}", name, **({"max_characters": 99} if version == "20250728" else {}))
    commands = {"view", "create", "str_replace", "insert"}
    assert set(schema["properties"]["command"]["enum"]) == commands | ({"undo_edit"} if undoes else set())
    assert ("insert_text" in schema["properties"]) is not undoes
    assert schema["required"] == ["command", "path"]


def test_memory_reaches_the_model_with_its_schema() -> None:
    schema = parameters("memory_20250818", "memory")
    assert schema["properties"]["command"]["enum"] == ["view", "create", "str_replace", "insert", "delete", "rename"]
    assert {"old_path", "new_path", "insert_text", "view_range"} < set(schema["properties"])


def test_what_a_tool_says_about_itself_is_ignored_and_named_unless_it_asks_for_nothing() -> None:
    ignored = IgnoredFields()
    hints = {
        "defer_loading": True,
        "allowed_callers": ["code_execution_20250825"],
        "input_examples": [{"city": "Rome"}],
        "eager_input_streaming": True,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    found = decoded(
        WEATHER | hints, {"type": "bash_20250124", "name": "bash", "strict": True, **hints}, ignored=ignored
    )
    assert set(ignored.names) == {f"tools[].{name}" for name in hints}
    assert [tool.function.strict for tool in found.offered] == [None, True]
    nothing = IgnoredFields(refuse=True)
    decoded(WEATHER | {"defer_loading": False, "allowed_callers": ["direct"], "cache_control": None}, ignored=nothing)
    assert nothing.names == ()
