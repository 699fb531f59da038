"""Calls of Qwen 3 Coder, Qwen 3.5 and Nemotron 3, whose values are raw text. Pure.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The tags are text, but for the outer ones, which models leave out at times. The tool's schema says what a value is: a
text, passed on as it comes, or JSON. A call as Hermes writes it may stand between the outer tags, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.frontend.tool_parsers import hermes, json_text, lark
from services.frontend.tool_parsers.call_object import call_object
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader

MARKS = (*hermes.MARKS, "<function=")
_OPEN, _CLOSE, _FUNCTION = MARKS
_FUNCTION_END, _PARAMETER, _VALUE_END = "</function>", "<parameter=", "</parameter>"
BEGINNING = re.compile(rf"{_OPEN}\s*{_FUNCTION}([^>]+)>")
"""How a call begins, up to the tool's name."""
_REASONED = "</think>"
_KEY = re.compile(r"[^<>\n]+")
_KEY_LIMIT_CHARACTERS = 256
_WHITE = r"[ \t\r\n]*"
_ENDS = re.compile(
    rf"\n?{_VALUE_END}{_WHITE}(?={_PARAMETER}|{_FUNCTION_END}|{_CLOSE})|(?=\n?{_FUNCTION_END}{_WHITE}{_CLOSE})"
)
"""The end of a value, with what follows it: a text may itself have such tags."""
_ENDS_ALL = re.compile(rf"\n?{_VALUE_END}{_WHITE}\Z")
_LOOK_CHARACTERS = 64
_BARE = {"type", *lark.ANNOTATIONS}
_NULL = re.compile(rf"(?:null|None){_WHITE}{_VALUE_END}")


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read text and calls. A call counts even if the model ends its turn without the closing tags."""
    while (yield from reader.read_until(_OPEN, result.add_text, _FUNCTION)):
        if (yield from result.attempt_call(_call)):
            yield from reader.optional_spaced(_CLOSE)
            yield from reader.optional_spaced(_REASONED)


def _call(reader: TextReader, result: ParseResult) -> Reading[None]:
    if (yield from reader.optional_spaced(_OPEN)) and (yield from reader.peek()) == "{":
        yield from call_object(reader, result)
        return
    yield from reader.expect(_FUNCTION)
    name = yield from result.read_tool_name()
    yield from reader.expect_spaced(">")
    before = "{"
    while (yield from reader.optional(_PARAMETER)):
        key = yield from reader.read_word(_KEY, _KEY_LIMIT_CHARACTERS)
        yield from reader.expect(">")
        if before == "{":
            result.begin_call(name)
        result.add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _value(reader, result, value_types(result.schema_of(name), key))
        yield from reader.read_white()
    ends = (yield from reader.optional(_FUNCTION_END)) or (
        before != "{" and ((yield from reader.goes_on_with(_CLOSE)) or (reader.at_end and not reader.is_short))
    )
    if not ends:
        raise Malformed("malformed")
    if before == "{":
        result.begin_call(name)
    result.add_arguments("{}" if before == "{" else "}")
    result.end_call()


def _value(reader: TextReader, result: ParseResult, types: frozenset[str]) -> Reading[None]:
    """Read a value and its end tag. One line end after the tag, and one before the end tag, are no part of it. Raise
    Malformed if the text ends before."""
    yield from reader.optional("\n")
    if "null" in types and (yield from reader.look(_NULL, _LOOK_CHARACTERS)) is not None:
        types = frozenset({"null"})
    if types <= {"string", "null"} and types != {"null"}:
        result.add_arguments('"')
        yield from _read_value(reader, lambda text: result.add_arguments(json_text.quoted(text)))
        result.add_arguments('"')
        return
    written: list[str] = []

    def keep(text: str) -> None:
        written.append(text)
        result.add_arguments("")  # nothing that is kept here is kept by the reader, too

    try:
        yield from _read_value(reader, keep)
    except Malformed:
        if not reader.is_short:
            result.add_arguments('"' + json_text.quoted("".join(written)))
        raise
    result.add_arguments(_as_json("".join(written), types))


def _read_value(reader: TextReader, out: Callable[[str], None]) -> Reading[None]:
    tags = (_VALUE_END, f"\n{_FUNCTION_END}", _FUNCTION_END)
    while (yield from reader.read_until(f"\n{_VALUE_END}", out, *tags)):
        for end in (_ENDS, _ENDS_ALL):
            if (found := (yield from reader.look(end, _LOOK_CHARACTERS))) is not None:
                reader.read(found.end())
                return
        out(reader.read())
    raise Malformed("malformed")


# --- what a schema says of a value

_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_REF = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: what it says in JSON, if its schema has that type, or else the text."""
    try:
        written = json_text.whole_value(text.strip())
    except Malformed:
        written = ""
    kinds = {_KINDS.get(written[:1], "number")}
    if kinds == {"number"} and not set(written) & set(".eE"):
        kinds.add("integer")
    fits = "string" not in types or kinds & (types - {"string"})
    return written if written and fits else json.dumps(text, ensure_ascii=False)


def value_types(arguments: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool's arguments allows for one of them; empty if it does not say."""
    properties = arguments.get("properties")
    return _types(properties.get(key), arguments) if isinstance(properties, dict) else frozenset()


def _types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    schema = _resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset(one for one in ([named] if isinstance(named, str) else named) if isinstance(one, str))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            # The references of an option are not followed further: a schema may refer to itself.
            return frozenset().union(*(_types(_resolved(one, root), {}) for one in schema[word]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_KINDS.get(json.dumps(one)[0], "number") for one in values)


def _resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, or what it refers to among the definitions of the root; empty for what is none."""
    found = _REF.fullmatch(str(schema.get("$ref"))) if isinstance(schema, dict) else None
    if found is not None:
        definitions = root.get(found[1])
        schema = definitions.get(found[2]) if isinstance(definitions, dict) else None
    return schema if isinstance(schema, dict) else {}


# --- the grammar


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """Return the Lark rules that an answer must follow. Arguments come in the order of the schema. A tool whose schema
    asks what raw text cannot be held to, such as a pattern or a length, is called as Hermes writes it."""
    return [
        *hermes.frame(tokens, how, _FUNCTION),
        f"VALUE: {_VALUE}",
        "value[lazy]: VALUE",
        lark.either("call", len(calls)),
        *(_call_rule(at, call, tokens) for at, call in enumerate(calls)),
    ]


_VALUE = (
    r"/(?s:.*)\n<\/parameter>\n/ & ~/((?s:.*)[^\n])?<\/parameter>(?s:.*)/ & ~/(?s:.*)<\/parameter>[^\n](?s:.*)/"
    r" & ~/(?s:.*)<\/tool_call>(?s:.*)/"
)
"""Any text up to the first end tag, which stands in a line of its own."""


def _call_rule(at: int, call: lark.CallableTool, tokens: lark.Tokens) -> str:
    arguments = _arguments_rule(call.arguments)
    if arguments is None:
        return lark.json_call(at, call, "arguments")
    name, end = lark.quote(call.name + ">\n"), lark.quote(_FUNCTION_END)
    return f"call_{at}: {lark.mark_symbol(_FUNCTION, tokens)} {name} {arguments} {end}"


def _arguments_rule(arguments: dict[str, Any] | None) -> str | None:
    """Return the expression for arguments in tags; None if their schema cannot be expressed so."""
    if arguments is None:
        return f'({lark.quote(_PARAMETER)} /[^<>\\n]{{1,64}}/ ">\\n" value)*'
    properties, required = arguments.get("properties", {}), arguments.get("required", [])
    if arguments.keys() - lark.OBJECT_WORDS or not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(isinstance(key, str) and key in properties for key in required):
        return None
    written: list[str] = []
    for key, schema in properties.items():
        value = _value_rule(schema, arguments)
        if value is None or _KEY.fullmatch(key) is None or len(key) > _KEY_LIMIT_CHARACTERS:
            return None
        tag = f"{_PARAMETER}{key}>\n"
        one = f"{lark.quote(tag)} {value}"
        written.append(one if key in required else f"({one})?")
    return " ".join(written)


def _value_rule(schema: object, root: Mapping[str, Any]) -> str | None:
    """Return the expression for a value and its end tag; None if there is none for its schema."""
    types, resolved = _types(schema, root), _resolved(schema, root)
    end = lark.quote(f"\n{_VALUE_END}\n")
    if types and "string" not in types:
        definitions = {word: root[word] for word in lark.DEFINITIONS if word in root}
        return f"{lark.json_value({**definitions, **resolved})} {end}"
    words, texts = resolved.keys() - lark.ANNOTATIONS, resolved.get("enum")
    if types == {"string"} and texts and words <= {"type", "enum"}:
        plain = all(isinstance(one, str) and "</" not in one for one in texts)
        return f"({' | '.join(map(lark.quote, texts))}) {end}" if plain else None
    bare = words == {"type"} or (words == {"anyOf"} and all(one.keys() <= _BARE for one in resolved["anyOf"]))
    return "value" if bare and types and types <= {"string", "null"} else None
