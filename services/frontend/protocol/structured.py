"""The fields of a request that constrain its answer; each becomes a grammar (structured/grammar.py joins them).
Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.served_schema import closed_schema, served_schema
from services.frontend.protocol.tools import TOOLS_LIMIT, Tool, ToolName, check_size, decoded_object
from services.frontend.tool_parsers.lark import OPTIONS, quote

TEXT_LIMIT_CHARACTERS = 16 << 10
"""Characters of a regular expression, a choice or a grammar."""
CHOICES_LIMIT = 1000
GRAMMAR_LIMIT_CHARACTERS = 160 << 10
"""Characters of the whole grammar that is sent to a worker."""

Text = Annotated[str, Meta(max_length=TEXT_LIMIT_CHARACTERS)]


GrammarChoices = Annotated[list[Text], Meta(min_length=1, max_length=CHOICES_LIMIT)]


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's field; the answer follows the schema, `strict` or not."""

    name: str | None = None
    """The name is for the client alone."""
    schema: dict[str, Any] | None = None
    """None means any JSON."""
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text without constraints."""


class JsonObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object of any content."""

    schema: dict[str, Any] | None = None
    """The field of llama.cpp and others for a schema that the answer follows."""


class JsonSchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """Same as `json_schema.schema`: llama.cpp and others have it here."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's field, of which exactly one member is set."""

    json: dict[str, Any] | str | None = None
    """A JSON Schema, as an object or as a text."""
    regex: Text | None = None
    """A regular expression for the whole answer, in the syntax of Rust's regex crate."""
    choice: GrammarChoices | None = None
    grammar: Text | None = None
    """A grammar in llguidance's dialect of Lark, whose first rule is `start`."""
    json_object: Literal[True] | None = None


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of one of the request's tools."""

    name: ToolName


class NamedFunctionTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """One of the functions of the request, such as the one that must be called."""

    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """One of the custom tools of the request."""

    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = NamedFunctionTool | NamedCustomTool


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that are offered, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=TOOLS_LIMIT)]


class AllowedChoice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A choice of some of the tools of the request."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def offered(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """Return the tools that the model gets to know: those that the choice allows."""
    if choice == "none":
        return []
    if not isinstance(choice, AllowedChoice):
        return list(tools or ())
    allowed = {one.name for one in choice.allowed_tools.tools}
    return [tool for tool in tools or () if tool.function.name in allowed]


def is_forced(choice: ToolChoice | None) -> bool:
    """Return whether the answer must consist of calls."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return mode not in (None, "none", "auto")


def check_choice(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Check that there is each tool that a choice allows. Raise InvalidRequest, naming the field."""
    names = {tool.function.name for tool in tools or ()}
    for at, one in enumerate(choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else ()):
        if one.name not in names:
            raise field_error(f"tool_choice.allowed_tools.tools[{at}]", f"there is no tool named {one.name!r}")


class ConstraintPart(Struct, frozen=True):
    """The grammar that one field contributes to a constraint from several fields."""

    piece: dict[str, Any]
    """The grammar of this field alone."""
    param: str
    """The field that it comes from."""


class Constraint(Struct, frozen=True):
    """A constraint on an answer, with the field that it comes from."""

    grammar: dict[str, Any]
    """The grammar that the answer must follow."""
    param: str
    """The field that it comes from."""
    spelled: dict[str, Any] | None = None
    """The grammar with its marks spelled out as text, if it names any by token id."""
    content: dict[str, Any] | None = None
    """A grammar that `grammar` refers to as `content`."""
    parts: Sequence[ConstraintPart] = ()
    """The grammars that it is made of, if they come from several fields."""


class SchemaReader(Struct, frozen=True):
    """Turns the JSON Schemas of one request into grammars."""

    ignored: IgnoredFields
    """The fields without effect. Keywords that are ignored are noted there."""
    close: bool
    """Whether objects are closed."""

    def served(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a schema as a grammar gets it. `where` is its place in the body."""
        dropped: list[str] = []
        served = served_schema(closed_schema(schema) if self.close else schema, dropped)
        for word in dropped:
            self.ignored.add(f"{where}.{word}")
        return served

    def constraint(self, schema: dict[str, Any], where: str) -> Constraint:
        """Return the constraint to JSON that follows a schema. Raise InvalidRequest."""
        check_size(schema, where)
        if "x-guidance" in schema:
            raise field_error(f"{where}.x-guidance", "not a keyword of JSON Schema")
        return Constraint(json_grammar(self.served(schema, where)), where)


def response_format_constraint(asked: ResponseFormat | None, schemas: SchemaReader) -> Constraint | None:
    """Return the constraint of `response_format`; None if any text is allowed. Raise InvalidRequest."""
    where = "response_format.schema"
    match asked:
        case None | TextFormat():
            return None
        case JsonObjectFormat(schema):
            if schema is None:
                return Constraint(json_grammar({"type": "object"}), "response_format")
        case JsonSchemaFormat(named, schema):
            if named is not None:
                schema, where = named.schema or {}, "response_format.json_schema.schema"
            elif schema is None:
                raise field_error("response_format.json_schema", "needed for type json_schema")
    return schemas.constraint(schema, where)


def structured_outputs_constraint(
    asked: StructuredOutputs, schemas: SchemaReader, prefix: str = "structured_outputs."
) -> Constraint:
    """Return the constraint of `structured_outputs`, or of fields with another prefix. Raise InvalidRequest."""
    named = [field for field in asked.__struct_fields__ if getattr(asked, field) is not None]
    if len(named) != 1:
        raise field_error(prefix.rstrip("._"), f"set exactly one of {', '.join(asked.__struct_fields__)}")
    where = f"{prefix}{named[0]}"
    if asked.json is not None:
        schema = decoded_object(asked.json, where) if isinstance(asked.json, str) else asked.json
        return schemas.constraint(schema, where)
    if asked.regex is not None:
        return Constraint({"lark_grammar": f"start: /{_within_slashes(asked.regex)}/"}, where)
    if asked.choice is not None:
        return Constraint({"lark_grammar": "start: " + " | ".join(map(quote, asked.choice))}, where)
    if asked.grammar is not None:
        return Constraint({"lark_grammar": asked.grammar}, where)
    return Constraint(json_grammar({"type": "object"}), where)


def json_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the grammar of JSON that follows a schema."""
    return {"json_schema": {**schema, "x-guidance": OPTIONS}}


def _within_slashes(regex: str) -> str:
    """Return a regular expression as it stands between slashes in Lark: with slashes and line ends escaped."""
    escapes = {"\n": "\\n", "/": "\\/"}
    return re.sub(r"\\(.)|[/\n]", lambda found: escapes.get(found[1] or found[0], found[0]), regex, flags=re.DOTALL)
