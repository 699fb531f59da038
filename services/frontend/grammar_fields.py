"""What a request says its answer must look like, and the grammar that says the same to an engine. Pure.

    response_format, structured_outputs, tool_choice ─▶ one piece of grammar ─▶ behind thinking, if there is any ─▶ text

The text is llguidance's JSON: a list of grammars, the first one begins and may name others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.frontend.tool_fields import Tool, ToolName, check_size, decoded_object
from services.frontend.tools.formats import CallText
from shared.errors import InvalidRequest

TEXT_LIMIT_CHARACTERS = 16 << 10
"""Of a regular expression or a grammar."""
CHOICES_LIMIT = 1000
GRAMMAR_LIMIT_CHARACTERS = 160 << 10
"""Of all that is sent to a worker."""
_OPTIONS = {"whitespace_pattern": "[ ]?"}
"""Between JSON's tokens: more would let a weak model go on with white space to its limit."""

Text = Annotated[str, Meta(max_length=TEXT_LIMIT_CHARACTERS)]


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's; the answer holds to it, `strict` or not."""

    name: ToolName
    schema: dict[str, Any]
    description: Text | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Anything."""


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that holds to a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's; exactly one of them."""

    json: dict[str, Any] | str | None = None
    """A schema, or one as text."""
    regex: Text | None = None
    """For all of the answer; in the syntax of Rust's regex crate."""
    choice: Annotated[list[Text], Meta(min_length=1, max_length=CHOICES_LIMIT)] | None = None
    grammar: Text | None = None
    """In llguidance's Lark dialect; it begins with `start`."""
    json_object: Literal[True] | None = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the request's tools."""

    name: ToolName


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly this one is called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Held(Struct, frozen=True):
    """What an answer is held to."""

    piece: dict[str, Any]
    """One grammar."""
    param: str
    """The field that says so."""

    def text(self, *, thinks: bool, begun: bool) -> str:
        """The whole grammar: of a model that thinks, behind its thinking; `begun`, if the prompt ends within that.
        Raises InvalidRequest."""
        if begun:
            grammars = [{"lark_grammar": _THOUGHT.format("thought white @answer")}, {"name": "answer", **self.piece}]
        elif thinks:
            whole = _THOUGHT.format('("<think>" thought white)? @answer')
            grammars = [{"lark_grammar": whole}, {"name": "answer", **self.piece}]
        else:
            grammars = [self.piece]
        text = msgspec.json.encode({"grammars": grammars}).decode()
        if len(text) > GRAMMAR_LIMIT_CHARACTERS:
            raise InvalidRequest(
                f"{self.param}: a grammar of {len(text)} characters; {GRAMMAR_LIMIT_CHARACTERS} are the limit",
                param=self.param,
            )
        return text


_THOUGHT = "start: {}\nthought[lazy]: /(.|\\n)*<\\/think>/\nwhite: /[ \\n]{{0,4}}/\n"
"""Lazy: thinking ends with the first closing tag."""


def held_by_format(asked: ResponseFormat | None) -> Held | None:
    """None: to nothing. Raises InvalidRequest."""
    match asked:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return Held(_json({"type": "object"}), "response_format")
        case JsonSchemaFormat(schema):
            where = "response_format.json_schema.schema"
            return Held(_schema(schema.schema, where), where)


def held_by_structure(asked: StructuredOutputs | None) -> Held | None:
    """None: to nothing. Raises InvalidRequest."""
    if asked is None:
        return None
    named = [field for field in asked.__struct_fields__ if getattr(asked, field) is not None]
    if len(named) != 1:
        fields = ", ".join(asked.__struct_fields__)
        raise InvalidRequest(f"structured_outputs: exactly one of {fields}", param="structured_outputs")
    where = f"structured_outputs.{named[0]}"
    if asked.json is not None:
        schema = decoded_object(asked.json, where) if isinstance(asked.json, str) else asked.json
        return Held(_schema(schema, where), where)
    if asked.regex is not None:
        return Held({"lark_grammar": f"start: /{_within_slashes(asked.regex)}/"}, where)
    if asked.choice is not None:
        return Held({"lark_grammar": "start: " + " | ".join(map(_quoted, asked.choice))}, where)
    if asked.grammar is not None:
        return Held({"lark_grammar": asked.grammar}, where)
    return Held(_json({"type": "object"}), where)


def held_to_calls(
    tools: Sequence[Tool], choice: ToolChoice | None, written: CallText | None, *, parallel: bool
) -> Held:
    """At least one call, or exactly one of the named tool; `written`: as the model's format has it, None where it
    cannot be held to that. Raises InvalidRequest."""
    named = choice.function.name if isinstance(choice, NamedTool) else None
    callable_ = [tool for tool in tools if named in (None, tool.function.name)]
    if not callable_:
        wrong = "there are no tools" if named is None else f"there is no tool {named!r}"
        raise InvalidRequest(f"tool_choice: {wrong}", param="tool_choice")
    if written is None:
        raise InvalidRequest(
            "tool_choice: calls cannot be forced in the format that this model writes them in",
            param="tool_choice",
            code="unsupported_parameter",
        )
    once = named is not None or not parallel
    rules = ["start: call" if once else f"start: call ({_quoted(written.between)} call)*"]
    rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(callable_))))
    for at, tool in enumerate(callable_):
        function = tool.function
        arguments = {"properties": {}, **function.parameters} if function.parameters else _NO_ARGUMENTS
        name = json.dumps(function.name)
        opening, schema = _quoted(written.opening.replace("NAME", name)), _json({"type": "object", **arguments})
        rules.append(f"call_{at}: {opening} %json {json.dumps(schema['json_schema'])} {_quoted(written.closing)}")
    return Held({"lark_grammar": "\n".join(rules)}, "tools")


_NO_ARGUMENTS: dict[str, Any] = {"properties": {}, "additionalProperties": False}


def _schema(schema: dict[str, Any], where: str) -> dict[str, Any]:
    check_size(schema, where)
    if "x-guidance" in schema:
        raise InvalidRequest(f"{where}.x-guidance: not a word of JSON Schema", param=f"{where}.x-guidance")
    return _json(schema)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": _OPTIONS}}


def _quoted(text: str) -> str:
    """As a literal of the Lark dialect."""
    return json.dumps(text, ensure_ascii=False)


def _within_slashes(regex: str) -> str:
    """As the Lark dialect has it: slashes are escaped, and lines end nowhere."""
    return re.sub(r"\\(.)|[/\n]", _escaped, regex, flags=re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    character = found[1] or found[0]
    if character == "\n":
        return "\\n"
    return "\\/" if character == "/" else found[0]
