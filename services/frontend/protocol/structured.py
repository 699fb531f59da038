"""What a request says its answer must look like: each field is a piece of the grammar that grammar.py makes. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.frontend.protocol.tools import ToolName, check_size, decoded_object
from services.frontend.tool_parsers.lark import OPTIONS, quote
from shared.errors import InvalidRequest

UNSUPPORTED = "unsupported_parameter"
TEXT_LIMIT_CHARACTERS = 16 << 10
"""Of a regular expression or a grammar."""
CHOICES_LIMIT = 1000
GRAMMAR_LIMIT_CHARACTERS = 160 << 10
"""Of all that is sent to a worker."""

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


class ConstraintPart(Struct, frozen=True):
    """What one field brings to a form of several."""

    piece: dict[str, Any]
    """A grammar for it alone."""
    param: str


class Constraint(Struct, frozen=True):
    """What one field holds an answer to."""

    grammar: dict[str, Any]
    """One grammar."""
    param: str
    """The field that says so."""
    spelled: dict[str, Any] | None = None
    """The same with its marks spelled out, where it names any by their ids."""
    content: dict[str, Any] | None = None
    """A grammar that the piece names as `content`."""
    parts: Sequence[ConstraintPart] = ()
    """What it is made of, where that comes from several fields."""


def response_format_constraint(asked: ResponseFormat | None) -> Constraint | None:
    """None: anything. Raises InvalidRequest."""
    match asked:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return Constraint(json_grammar({"type": "object"}), "response_format")
        case JsonSchemaFormat(schema):
            where = "response_format.json_schema.schema"
            return Constraint(_schema(schema.schema, where), where)


def structured_outputs_constraint(asked: StructuredOutputs | None) -> Constraint | None:
    """None: anything. Raises InvalidRequest."""
    if asked is None:
        return None
    named = [field for field in asked.__struct_fields__ if getattr(asked, field) is not None]
    if len(named) != 1:
        fields = ", ".join(asked.__struct_fields__)
        raise InvalidRequest(f"structured_outputs: exactly one of {fields}", param="structured_outputs")
    where = f"structured_outputs.{named[0]}"
    if asked.json is not None:
        schema = decoded_object(asked.json, where) if isinstance(asked.json, str) else asked.json
        return Constraint(_schema(schema, where), where)
    if asked.regex is not None:
        return Constraint({"lark_grammar": f"start: /{_within_slashes(asked.regex)}/"}, where)
    if asked.choice is not None:
        return Constraint({"lark_grammar": "start: " + " | ".join(map(quote, asked.choice))}, where)
    if asked.grammar is not None:
        return Constraint({"lark_grammar": asked.grammar}, where)
    return Constraint(json_grammar({"type": "object"}), where)


def _schema(schema: dict[str, Any], where: str) -> dict[str, Any]:
    check_size(schema, where)
    if "x-guidance" in schema:
        raise InvalidRequest(f"{where}.x-guidance: not a word of JSON Schema", param=f"{where}.x-guidance")
    return json_grammar(schema)


def json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """A grammar of JSON that holds to a schema."""
    return {"json_schema": {**schema, "x-guidance": OPTIONS}}


def _within_slashes(regex: str) -> str:
    """As the Lark dialect has it: slashes are escaped, and lines end nowhere."""
    return re.sub(r"\\(.)|[/\n]", _escaped, regex, flags=re.DOTALL)


def _escaped(found: re.Match[str]) -> str:
    character = found[1] or found[0]
    if character == "\n":
        return "\\n"
    return "\\/" if character == "/" else found[0]
