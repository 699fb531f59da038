"""Which functions a chat offers for the tools of a response; every refusal is in `bad_bodies.py`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.responses_tools import (
    FUNCTIONS_LIMIT,
    CalledTool,
    ChosenTool,
    ResponseToolChoice,
    ResponseTools,
    chat_name,
    decode_tools,
)
from services.frontend.protocol.structured import AllowedChoice, NamedFunction, NamedFunctionTool
from services.frontend.protocol.structured import offered as allowed_of
from shared.errors import InvalidRequest


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **more}


def space(name: str, *tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": list(tools), **more}


def decoded(
    *tools: dict[str, Any], choice: ResponseToolChoice | None = None, ignored: IgnoredFields | None = None
) -> ResponseTools:
    return decode_tools([msgspec.Raw(json.dumps(tool).encode()) for tool in tools], choice, ignored or IgnoredFields())


def offered(found: ResponseTools) -> list[tuple[str, str | None]]:
    return [(tool.function.name, tool.function.description) for tool in found.offered]


def test_functions_of_a_namespace_have_names_of_both_and_the_first_is_described_with_it() -> None:
    crm = space("crm", function("list", description="Lists."), function("add"), description="Customers.")
    found = decoded(function("now"), crm)
    assert offered(found) == [("now", None), ("crm__list", "Customers.\n\nLists."), ("crm__add", None)]
    assert found.called == {"crm__list": CalledTool("list", "crm"), "crm__add": CalledTool("add", "crm")}
    assert found.places == ["tools[0]", "tools[1].tools[0]", "tools[1].tools[1]"]


@pytest.mark.parametrize(
    ("namespace", "name", "chats"),
    [
        ("crm", "list", "crm__list"),
        ("functions", "list", "list"),
        ("mcp__files__", "read", "mcp__files__read"),
        ("my server.com", "read", "my_server_com__read"),
        ("x" * 40, "y" * 40, "x" * 40 + "__" + "y" * 13 + "_"),
    ],
)
def test_a_name_of_both_fits_into_a_chat(namespace: str, name: str, chats: str) -> None:
    found = chat_name(namespace, name)
    assert found.startswith(chats)
    assert len(found) <= 64
    assert found == chat_name(namespace, name)


def test_two_tools_never_share_a_name() -> None:
    found = decoded(function("a__b"), space("a", function("b")), space("a_", function("b")), space("a.", function("b")))
    names = [name for name, _ in offered(found)]
    assert len(set(names)) == 4
    assert names[0] == "a__b"
    assert {tool.namespace for tool in found.called.values()} == {"a", "a_", "a."}


def test_what_is_not_served_is_ignored_by_its_type_also_in_a_namespace() -> None:
    ignored = IgnoredFields()
    tools = [{"type": kind} for kind in ("web_search", "mcp", "code_interpreter", "image_generation", "tool_search")]
    inside = space("n", {"type": "of_tomorrow"}, function("f"))
    deferred = function("g", defer_loading=True, allowed_callers=["programmatic"], output_schema={"type": "string"})
    found = decoded(*tools, inside, deferred, ignored=ignored)
    assert [name for name, _ in offered(found)] == ["n__f", "g"]
    assert ignored.names == (
        *(f"tools[].{tool['type']}" for tool in tools),
        "tools[].allowed_callers",
        "tools[].defer_loading",
        "tools[].output_schema",
        "tools[].of_tomorrow",
    )


def test_values_that_ask_for_nothing_are_not_named() -> None:
    ignored = IgnoredFields(refuse=True)
    decoded(function("g", defer_loading=False, allowed_callers=["direct"], output_schema=None), ignored=ignored)
    assert ignored.names == ()


def test_the_strict_mode_refuses_what_is_not_served_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match="'web_search' are not served") as refused:
        decoded(function("a"), {"type": "web_search"}, ignored=IgnoredFields(refuse=True))
    assert refused.value.param == "tools[1].type"


def test_a_choice_names_a_function_in_its_namespace() -> None:
    tools = (function("list"), space("crm", function("list")))
    for choice, name in (
        (ChosenTool("function", "list"), "list"),
        (ChosenTool("function", "list", "crm"), "crm__list"),
    ):
        assert decoded(*tools, choice=choice).choice == NamedFunctionTool(NamedFunction(name))


def test_allowed_tools_are_the_only_ones_that_are_offered() -> None:
    tools = (function("a"), function("b"), space("crm", function("c")))
    some = [function("b"), {**function("c"), "namespace": "crm"}]
    found = decoded(*tools, choice=ChosenTool("allowed_tools", mode="required", tools=some))
    assert isinstance(found.choice, AllowedChoice)
    assert found.choice.allowed_tools.mode == "required"
    assert [one.function.name for one in allowed_of(found.offered, found.choice)] == ["b", "crm__c"]
    assert found.places == ["tools[0]", "tools[1]", "tools[2].tools[0]"]
    with pytest.raises(InvalidRequest, match="no tool named 'x'") as refused:
        decoded(*tools, choice=ChosenTool("allowed_tools", mode="auto", tools=[function("x")]))
    assert refused.value.param == "tool_choice.tools[0]"


def test_the_functions_of_all_namespaces_are_bounded_together() -> None:
    """16,384 of them took six seconds."""
    many = [space(f"n{at}", *(function(f"f{number}") for number in range(128))) for at in range(128)]
    with pytest.raises(InvalidRequest, match=f"more than {FUNCTIONS_LIMIT} functions") as refused:
        decoded(*many)
    assert refused.value.param == f"tools[{FUNCTIONS_LIMIT // 128}]"
