"""Tools in a request: those it offers, and their form in chat templates. Pure.

The input of a custom tool is a text instead of a JSON object. Open models write calls as JSON. So a custom tool reaches
the model as a function with one parameter, `input`, and what a call has there is the tool's input.

    {"type": "custom", "custom": {"name": "apply_patch", …}}                ─▶ CustomFunction
    {"name": "apply_patch", "arguments": {"input": "*** Begin Patch…"}}     ─▶ the text: tool_parsers/parse_result.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from services.frontend.protocol.errors import field_error
from shared.errors import MALFORMED

TOOLS_LIMIT = 128
"""OpenAI's limit of tools in one request."""
DESCRIPTION_LIMIT_CHARACTERS = 128 << 10
"""Characters of the description of one tool. Claude Code has one of 19,000."""
INPUT_GRAMMAR_LIMIT_CHARACTERS = 16 << 10
"""Characters of the grammar of a custom tool's input."""
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
    """A JSON Schema of an object. None if the function has no parameters."""
    strict: bool | None = None
    """Whether arguments must follow the schema. They always do if `tool_choice` forces a call."""


INPUT = "input"
"""The parameter of a custom tool."""


class InputGrammar(Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar that an input follows."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(max_length=INPUT_GRAMMAR_LIMIT_CHARACTERS)]


class AnyInput(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """An input of any text."""


class GrammarInput(InputGrammar, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """An input that follows a grammar. It has the fields of a InputGrammar, inherited by msgspec."""


class ChatGrammarInput(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """An input that follows a grammar, with the second level that chats have."""

    grammar: InputGrammar


class CustomInput(Struct, frozen=True, forbid_unknown_fields=True):
    """A custom tool."""

    name: ToolName
    description: Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)] | None = None
    format: AnyInput | ChatGrammarInput | None = None


class CustomFunction(Function, frozen=True, forbid_unknown_fields=True):
    """The function that the model knows a custom tool as."""

    grammar: InputGrammar | None = None


def custom_function(name: str, description: str | None, grammar: InputGrammar | None) -> CustomFunction:
    """Return the function for a custom tool. With a grammar its calls are held to it."""
    about = description or ""
    if grammar is not None:
        about = f"{about}\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}".lstrip()
    return CustomFunction(name, about or None, input_schema(), True if grammar else None, grammar)


def input_schema(**more: str) -> dict[str, Any]:
    """Return the schema of the parameters; `more` is what the input's own schema has in addition."""
    text = {"type": "string", "description": "The input of the tool, as it is.", **more}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class Tool(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of `tools`: a function, or a custom tool, which then has its function, too."""

    type: Literal["function", "custom"] = "function"
    """Ollama's clients leave it out."""
    function: Function = Function("")
    custom: CustomInput | None = None

    def __post_init__(self) -> None:
        """Set the function of a custom tool. Raise ValueError, which msgspec turns into an error of its own."""
        is_custom = self.custom is not None
        if is_custom != (self.type == "custom") or not (is_custom or self.function.name):
            raise ValueError(f"Object missing required field `{self.type}`")
        if self.custom is not None:
            form = self.custom.format
            grammar = form.grammar if isinstance(form, ChatGrammarInput) else None
            force_setattr(self, "function", custom_function(self.custom.name, self.custom.description, grammar))

    @property
    def place(self) -> str:
        """The field of the tool that says what it is."""
        return "function" if self.custom is None else "custom"


Tools = Annotated[list[Tool], Meta(max_length=TOOLS_LIMIT)]


def check_tools(tools: Sequence[Tool]) -> None:
    """Check the names and the sizes of tools. Raise InvalidRequest, naming the field."""
    names: set[str] = set()
    left = TOOLS_LIMIT_BYTES
    for at, tool in enumerate(tools):
        where, function = f"tools[{at}].{tool.place}", tool.function
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
    except MALFORMED as wrong:  # a ValidationError is one too
        raise field_error(where, f"not a JSON object: {wrong}") from None
