"""What a request says of tools: those it offers, the calls in its messages, and their form in chat templates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import InvalidRequest

TOOLS_LIMIT = 128
"""OpenAI's."""
DESCRIPTION_LIMIT_CHARACTERS = 16 << 10
SCHEMA_LIMIT_BYTES = 64 << 10
"""Of one tool's parameters, as JSON."""
TOOLS_LIMIT_BYTES = 512 << 10
"""Of all tools."""
SCHEMA_DEPTH_LIMIT = 64

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
"""OpenAI's."""


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """What a model may call."""

    name: ToolName
    description: Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of an object; None: it has none."""
    strict: bool | None = None
    """Arguments hold to the schema; they do so anyway where `tool_choice` forces a call."""


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tools`; custom ones are not built."""

    type: Literal["function"]
    function: Function


Unread = Annotated[msgspec.Raw, Meta(extra_json_schema={"description": "Anything; it is not read."})]
"""What clients leave beside a field: kept as its bytes, since 4 MiB of it would be a million objects."""

Tools = Annotated[list[Tool], Meta(max_length=TOOLS_LIMIT)]


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the model called."""

    name: ToolName
    arguments: str
    """A JSON object, or nothing."""
    parsed_arguments: Unread | UnsetType = UNSET
    """The same, as OpenAI's client leaves it beside them."""


class Call(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of an assistant message's `tool_calls`."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """Its place, as clients leave it that put a message together from chunks."""


Calls = Annotated[list[Call], Meta(max_length=TOOLS_LIMIT)]


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest, naming the field."""
    names: set[str] = set()
    left = TOOLS_LIMIT_BYTES
    for at, tool in enumerate(tools):
        where, function = f"tools[{at}].function", tool.function
        if function.name in names:
            raise InvalidRequest(f"{where}.name: there are two tools {function.name!r}", param=f"{where}.name")
        names.add(function.name)
        _check_schema(function.parameters or {}, f"{where}.parameters")
        left -= len(msgspec.json.encode(tool))
        if left < 0:
            raise InvalidRequest(f"tools: longer than {TOOLS_LIMIT_BYTES} bytes", param="tools")


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """What it says of each parameter is between its author and the model."""
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.type: not 'object'", param=f"{where}.type")
    check_size(schema, where)


def check_size(schema: dict[str, Any], where: str) -> None:
    """Raises InvalidRequest where it is too deep or too long."""
    if len(msgspec.json.encode(schema)) > SCHEMA_LIMIT_BYTES:  # first: to look for its depth takes long where it is
        raise InvalidRequest(f"{where}: longer than {SCHEMA_LIMIT_BYTES} bytes", param=where)
    if _depth(schema) > SCHEMA_DEPTH_LIMIT:
        raise InvalidRequest(f"{where}: nested deeper than {SCHEMA_DEPTH_LIMIT} levels", param=where)


def _depth(schema: dict[str, Any]) -> int:
    """As far as it matters."""
    level: list[Any] = [schema]
    for depth in range(SCHEMA_DEPTH_LIMIT + 1):
        if not level:
            return depth
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return SCHEMA_DEPTH_LIMIT + 1


def tools_as_rendered(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As templates read them, keys in OpenAI's order."""
    return [{"type": "function", "function": _function(tool.function)} for tool in tools]


def _function(function: Function) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, **described, "parameters": parameters}


def calls_as_rendered(calls: Sequence[Call], where: str) -> list[dict[str, Any]]:
    """As templates read them: with arguments as an object. Raises InvalidRequest where they are none."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": decoded_object(call.function.arguments or "{}", f"{where}[{at}].function.arguments"),
            },
        }
        for at, call in enumerate(calls)
    ]


def decoded_object(written: str, where: str) -> dict[str, Any]:
    """Of JSON that a field has as a text. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as wrong:  # a ValidationError is one too
        raise InvalidRequest(f"{where}: not a JSON object: {wrong}", param=where) from None
