"""Tools in a request: those it offers, and their form in chat templates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.frontend.protocol.errors import field_error

TOOLS_LIMIT = 128
"""OpenAI's limit of tools in one request."""
DESCRIPTION_LIMIT_CHARACTERS = 16 << 10
SCHEMA_LIMIT_BYTES = 64 << 10
"""Bytes of the JSON Schema of one tool's parameters."""
TOOLS_LIMIT_BYTES = 512 << 10
"""Bytes of all tools together, as JSON."""
SCHEMA_DEPTH_LIMIT = 64

ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
"""A name as OpenAI allows it."""


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of an object; None: the function has no parameters."""
    strict: bool | None = None
    """Whether arguments must follow the schema. They always do if `tool_choice` forces a call."""


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tools`; custom tools are not built."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=TOOLS_LIMIT)]


def check_tools(tools: Sequence[Tool]) -> None:
    """Check the names and the sizes of tools. Raise InvalidRequest, naming the field."""
    names: set[str] = set()
    left = TOOLS_LIMIT_BYTES
    for at, tool in enumerate(tools):
        where, function = f"tools[{at}].function", tool.function
        if function.name in names:
            raise field_error(f"{where}.name", f"there are two tools named {function.name!r}")
        names.add(function.name)
        _check_schema(function.parameters or {}, f"{where}.parameters")
        left -= len(msgspec.json.encode(tool))
        if left < 0:
            raise field_error("tools", f"longer than {TOOLS_LIMIT_BYTES} bytes together")


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """Check a schema's type and size. What it says of each parameter is not checked."""
    if schema.get("type", "object") != "object":
        raise field_error(f"{where}.type", "must be 'object'")
    check_size(schema, where)


def check_size(schema: dict[str, Any], where: str) -> None:
    """Check the size of a JSON Schema. Raise InvalidRequest if it is too long or nested too deeply."""
    if len(msgspec.json.encode(schema)) > SCHEMA_LIMIT_BYTES:  # first: a long one takes time to measure
        raise field_error(where, f"longer than {SCHEMA_LIMIT_BYTES} bytes")
    if _depth(schema) > SCHEMA_DEPTH_LIMIT:
        raise field_error(where, f"nested deeper than {SCHEMA_DEPTH_LIMIT} levels")


def _depth(schema: dict[str, Any]) -> int:
    """Return the depth of nesting, at most SCHEMA_DEPTH_LIMIT + 1."""
    level: list[Any] = [schema]
    for depth in range(SCHEMA_DEPTH_LIMIT + 1):
        if not level:
            return depth
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return SCHEMA_DEPTH_LIMIT + 1


def tools_as_rendered(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates read, with keys in OpenAI's order."""
    return [{"type": "function", "function": _function(tool.function)} for tool in tools]


def _function(function: Function) -> dict[str, Any]:
    described = {} if function.description is None else {"description": function.description}
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, **described, "parameters": parameters}


def decoded_object(written: str, where: str) -> dict[str, Any]:
    """Decode a JSON object that a field holds as a text. Raise InvalidRequest."""
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as wrong:  # a ValidationError is one too
        raise field_error(where, f"not a JSON object: {wrong}") from None
