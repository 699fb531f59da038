"""The tools of /v1/responses, and the functions that a chat offers for them. Pure.

    tools ─▶ decode_tools ─▶ ResponseTools ─┬─▶ the tools of a chat
                                            └─▶ for each name in a chat, the tool that a call of it means

Functions of a namespace have a chat's name made of both names, since open models know no namespaces. Tools that OpenAI
runs, and kinds of tools that are not known, are ignored by their type, unless `tool_choice` asks for them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from services.frontend.protocol.decoding import Harmless, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import Hint
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.structured import (
    AllowedChoice,
    AllowedTools,
    NamedFunction,
    NamedFunctionTool,
    NamedTool,
    ToolChoice,
)
from services.frontend.protocol.tools import (
    DESCRIPTION_LIMIT_CHARACTERS,
    TOOLS_LIMIT,
    AnyInput,
    Function,
    GrammarInput,
    Tool,
    ToolName,
    custom_function,
)
from shared.errors import InvalidRequest

Description = Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)]
Namespace = Annotated[str, Meta(min_length=1, max_length=256)]
Callers = Annotated[Hint, Harmless(msgspec.Raw(b'["direct"]'))]


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function, without the second level that chats have."""

    name: ToolName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Callers = UNSET
    """Programs cannot call tools here; the model calls each itself."""
    defer_loading: Hint = UNSET
    """A tool that a search would find is offered at once, because nothing searches."""
    output_schema: Hint = UNSET


def _raw(*kinds: str) -> Meta:
    """Return the schema of a value that is one of these Structs, and that is not decoded yet."""
    return Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds]})


class CustomTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """A tool that takes a text."""

    name: ToolName
    description: Description | None = None
    format: AnyInput | GrammarInput | None = None
    allowed_callers: Callers = UNSET
    defer_loading: Hint = UNSET


class NamespaceTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="namespace"):
    """A group of functions."""

    name: Namespace
    tools: Annotated[list[Annotated[msgspec.Raw, _raw("FunctionTool", "CustomTool")]], Meta(max_length=TOOLS_LIMIT)]
    """Functions and custom tools; those of other types are ignored."""
    description: Description | None = None


ResponseTool = FunctionTool | CustomTool | NamespaceTool
RESPONSE_TOOLS: tuple[type[ResponseTool], ...] = (FunctionTool, CustomTool, NamespaceTool)
AnyTool = Annotated[msgspec.Raw, _raw("FunctionTool", "CustomTool", "NamespaceTool")]
"""A tool that is not decoded yet. Its `type` says which it is."""


class ChosenTool(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The one tool that must be called, or the tools of which some may or must be called."""

    type: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(max_length=256)] | None = None
    namespace: Namespace | None = None
    server_label: Annotated[str, Meta(max_length=256)] | None = None
    mode: Literal["auto", "required"] | None = None
    """With the type `allowed_tools`: whether one of `tools` must be called."""
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_LIMIT)] | None = None


ResponseToolChoice = Literal["none", "auto", "required"] | ChosenTool


class CalledTool(Struct, frozen=True):
    """The tool that a chat's name stands for."""

    name: str
    namespace: str | UnsetType = UNSET


class ResponseTools(Struct, frozen=True):
    """The tools of a request."""

    offered: list[Tool]
    """The tools as a chat offers them."""
    places: list[str]
    """The place of each in the body."""
    called: Mapping[str, CalledTool]
    """For each chat's name of a tool in a namespace, the tool."""
    echoed: list[ResponseTool]
    """The tools that are served, for the response."""
    choice: ToolChoice | None

    @property
    def chat_names(self) -> Mapping[tuple[str, str], str]:
        """For each namespace and name, the name in a chat."""
        return {(tool.namespace or "", tool.name): name for name, tool in self.called.items()}


class _Kind(Struct, frozen=True):
    type: Annotated[str, Meta(max_length=64)]


_TOOLS_BY_TYPE: Mapping[str, type[ResponseTool]] = {str(one.__struct_config__.tag): one for one in RESPONSE_TOOLS}
_ODD = re.compile(r"[^a-zA-Z0-9_-]")
_NAME_LIMIT_CHARACTERS = 64
FUNCTIONS_LIMIT = 1024
"""Functions and custom tools of one request, with those in namespaces and those that items add."""


def chat_name(namespace: str, name: str, taken: Collection[str] = ()) -> str:
    """Return the name that a function of a namespace has in a chat. It differs from the names in `taken`."""
    joined = _ODD.sub("_", name if namespace == "functions" else f"{namespace.rstrip('_')}__{name}")
    if len(joined) <= _NAME_LIMIT_CHARACTERS and joined not in taken:
        return joined
    digest = hashlib.sha256(f"{namespace}\n{name}".encode()).hexdigest()[:8]
    return f"{joined[: _NAME_LIMIT_CHARACTERS - 9]}_{digest}"


def decode_tools(
    given: Sequence[msgspec.Raw] | None,
    choice: ResponseToolChoice | None,
    ignored: IgnoredFields = REFUSE,
    added: Sequence[tuple[str, msgspec.Raw]] = (),
) -> ResponseTools:
    """Decode the tools of a request. `added`: those that items of its input add, each with its place; a tool replaces
    former ones of its name. Raise InvalidRequest, naming the field."""
    listed = {f"tools[{at}]": raw for at, raw in enumerate(given or ())}
    tools = [(place, tool) for place, raw in (*listed.items(), *added) if (tool := _decoded(raw, place, ignored))]
    taken = {tool.name for _, tool in tools if not isinstance(tool, NamespaceTool)}
    found = ResponseTools([], [], {}, [tool for place, tool in tools if place in listed], None)
    called: dict[str, CalledTool] = {}
    at_name: dict[tuple[str | None, str], int] = {}
    """The place of each name among those offered."""
    for place, tool in tools:
        for where, namespace, function in _functions(place, tool, ignored):
            former = at_name.setdefault((namespace, function.name), len(found.offered))
            if former < len(found.offered) and place not in listed:
                found.offered[former] = Tool("function", _function(function, found.offered[former].function.name))
                found.places[former] = where
                continue
            name = function.name
            if namespace is not None:
                name = chat_name(namespace, function.name, taken)
                taken.add(name)
                called[name] = CalledTool(function.name, namespace)
            if len(found.offered) == FUNCTIONS_LIMIT:
                raise field_error(place, f"more than {FUNCTIONS_LIMIT} functions, with those of namespaces")
            found.offered.append(Tool("function", _function(function, name)))
            found.places.append(where)
    return _chosen(replace(found, called=called), choice)


def _decoded(raw: msgspec.Raw, where: str, ignored: IgnoredFields) -> ResponseTool | None:
    """Return a tool; None for a kind that is ignored. Raise InvalidRequest."""
    kind = decode_body(_Kind, bytes(raw), where=where).type
    struct = _TOOLS_BY_TYPE.get(kind)
    if struct is None:
        ignored.add_or_raise(f"tools[].{kind}", not_served(f"{where}.type", kind))
        return None
    tool = decode_body(struct, bytes(raw), ignored, where)
    check_not_built(tool, f"{where}.", ignored)
    return tool


def _function(tool: FunctionTool | CustomTool, name: str) -> Function:
    if isinstance(tool, FunctionTool):
        return Function(name, tool.description, tool.parameters, tool.strict)
    return custom_function(name, tool.description, tool.format if isinstance(tool.format, GrammarInput) else None)


def _functions(
    place: str, tool: ResponseTool, ignored: IgnoredFields
) -> Iterator[tuple[str, str | None, FunctionTool | CustomTool]]:
    """Yield the functions of a tool, each with its place and its namespace. The first of a namespace is described with
    it. Raise InvalidRequest."""
    if not isinstance(tool, NamespaceTool):
        yield place, None, tool
        return
    about = f"{tool.description}\n\n" if tool.description else ""
    for at, raw in enumerate(tool.tools):
        inner = _decoded(raw, f"{place}.tools[{at}]", ignored)
        if isinstance(inner, NamespaceTool):
            raise field_error(f"{place}.tools[{at}].type", "a namespace holds functions, no other namespace")
        if inner is not None:
            yield (
                f"{place}.tools[{at}]",
                tool.name,
                replace(inner, description=about + (inner.description or "") or None),
            )
            about = ""


def not_served(field: str, kind: str) -> InvalidRequest:
    """Return the error for a kind of tool that is not served."""
    return field_error(
        field, f"tools of type {kind!r} are not served; give the model a function that does it", "unsupported_value"
    )


def _chosen(tools: ResponseTools, choice: ResponseToolChoice | None) -> ResponseTools:
    """Return the tools with the choice among them. Raise InvalidRequest."""
    if not isinstance(choice, ChosenTool):
        return replace(tools, choice=choice)
    if choice.type != "allowed_tools":
        return replace(tools, choice=_named(_choice_name(tools, choice, "tool_choice")))
    if choice.mode is None or not choice.tools:
        raise field_error("tool_choice", "allowed_tools needs a mode and tools")
    allowed: list[NamedTool] = []
    for at, one in enumerate(choice.tools):
        where = f"tool_choice.tools[{at}]"
        try:
            named = msgspec.convert(one, ChosenTool)
        except msgspec.ValidationError as wrong:
            raise field_error(where, str(wrong)) from None
        allowed.append(_named(_choice_name(tools, named, where)))
    return replace(tools, choice=AllowedChoice(AllowedTools(choice.mode, allowed)))


def _named(name: str) -> NamedFunctionTool:
    return NamedFunctionTool(NamedFunction(name))


def _choice_name(tools: ResponseTools, choice: ChosenTool, where: str) -> str:
    """Return the name in a chat of a chosen tool. Raise InvalidRequest."""
    if choice.type not in ("function", "custom"):
        raise not_served(f"{where}.type", choice.type)
    name = choice.name or ""
    if choice.namespace is not None:
        name = tools.chat_names.get((choice.namespace, name), "")
    if not any(tool.function.name == name for tool in tools.offered):
        raise field_error(where, f"there is no tool named {choice.name!r}")
    return name
