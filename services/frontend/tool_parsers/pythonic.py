"""Llama 4, Llama 3.2, ToolACE, OLMo 3: the answer begins with a Python list of calls, [f(a=1, b="x"), g()]. Pure.

Values are literals; they go out as JSON, character by character. Llama 4 may put <|python_start|> before the list and
<|python_end|> behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.tool_parsers import lark, python_text
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader

MARKS = ("<|python_start|>", "<|python_end|>")
_START, _END = MARKS
_NAME = re.compile(r"[0-9A-Za-z_-]+")
_NAME_LIMIT_CHARACTERS = 64
_KEYWORD = re.compile(r"\w+")
_KEYWORD_LIMIT_CHARACTERS = 256


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """What does not begin with a list is text."""
    yield from reader.read_white(result.add_text)
    if (yield from reader.peek()) in ("[", "<"):
        further = yield from result.attempt_call(_first)
        while further:
            yield from reader.read_white()
            further = yield from reader.optional(",")
            yield from reader.read_white()
            if further and (yield from reader.peek()) != "]":
                further = yield from result.attempt_call(_call)
            else:
                further = False
                yield from reader.optional("]")
                yield from reader.optional(_END)
                yield from reader.read_white()
    yield from reader.read_rest(result.add_text)


def _first(reader: TextReader, result: ParseResult) -> Reading[None]:
    yield from reader.optional(_START)
    yield from reader.read_white()
    yield from reader.expect("[")
    yield from reader.read_white()
    yield from _call(reader, result)


def _call(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Only keyword arguments have a name to go by."""
    name = yield from reader.read_word(_NAME, _NAME_LIMIT_CHARACTERS)
    result.check_tool_name(name)
    yield from reader.read_white()
    yield from reader.expect("(")
    yield from reader.read_white()
    keyword = yield from _keyword(reader)
    result.begin_call(name)
    result.add_arguments("{")
    while keyword:
        result.add_arguments(json.dumps(keyword, ensure_ascii=False) + ": ")
        yield from python_text.value(reader, result.add_arguments)
        yield from reader.read_white()
        if not (yield from reader.optional(",")):
            break
        yield from reader.read_white()
        keyword = yield from _keyword(reader)
        if keyword:
            result.add_arguments(", ")
    yield from reader.expect(")")
    result.add_arguments("}")
    result.end_call()


def _keyword(reader: TextReader) -> Reading[str]:
    """With its `=`; "" where the arguments end instead."""
    keyword = yield from reader.read_word(_KEYWORD, _KEYWORD_LIMIT_CHARACTERS)
    if not keyword:
        if (yield from reader.peek()) != ")":
            raise Malformed("malformed")
        return ""
    yield from reader.read_white()
    yield from reader.expect("=")
    yield from reader.read_white()
    return keyword


_ANNOTATIONS = frozenset({"$schema", "title", "description", "default", "examples", "deprecated"})
_DEFINITIONS = ("$defs", "definitions")
_WORDS = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS, *_ANNOTATIONS}
"""Of an arguments' schema."""


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """A grammar's, that an answer is held to. What begins like a list is one of calls. Raises lark.Unwritable.

    Arguments come in the schema's order, and none beside those that it names. Their values are JSON, which this format
    is read as too, but for a boolean, which models write as Python has it.
    """
    before, behind = (f"({lark.mark_symbol(one, tokens)})? " if one in tokens else "" for one in MARKS)
    further = "" if how == "one" else '(", " call)*'
    first = f"({'|'.join(re.escape(one) for one in ('[', _START))})"
    return [
        "start: calls | TEXT" if how == "any" else "start: calls",
        f'calls: {before}"[" call {further} "]" {behind}',
        f"TEXT: {lark.text_pattern(not_first=lark.WHITE + first)}",
        lark.either("call", len(calls)),
        *(rule for at, call in enumerate(calls) for rule in _call_rules(f"call_{at}", call)),
    ]


def _call_rules(rule: str, call: lark.CallableTool) -> list[str]:
    """Each argument's rule ends with what may follow it."""
    opening = lark.quote(call.name + "(")
    if call.arguments is None:
        value = lark.json_value({})
        return [
            f'{rule}: {opening} ({rule}_any (", " {rule}_any)*)? ")"',
            f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {value}",
        ]
    properties, required = _arguments(call.name, call.arguments)
    definitions = {word: call.arguments[word] for word in _DEFINITIONS if word in call.arguments}
    rules = [f'{rule}: {opening} {rule}_0 ")"']
    for at, (keyword, schema) in enumerate(properties.items()):
        argument = f"{lark.quote(keyword + '=')} {_value({**definitions, **schema})}"
        skipped = "" if keyword in required else f" | {rule}_{at + 1}"
        further = "" if keyword in required else f" | {rule}_{at + 1}_more"
        rules += [
            f"{rule}_{at}_value: {argument}",
            f"{rule}_{at}: {rule}_{at}_value {rule}_{at + 1}_more{skipped}",
            f'{rule}_{at}_more: ", " {rule}_{at}_value {rule}_{at + 1}_more{further}',
        ]
    return [*rules, f'{rule}_{len(properties)}: ""', f'{rule}_{len(properties)}_more: ""']


def _arguments(tool: str, schema: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Their schemas by keyword, and those that are required. Raises lark.Unwritable."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for word in sorted(schema.keys() - _WORDS):
        raise lark.UnsupportedSchema(tool, word, "cannot be held to where calls are written as Python")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise lark.UnsupportedSchema(tool, "properties", "not an object, or `required` is not a list")
    for keyword, one in properties.items():
        if not isinstance(one, dict) or not keyword.isidentifier() or len(keyword) > _KEYWORD_LIMIT_CHARACTERS:
            raise lark.UnsupportedSchema(
                tool, f"properties.{keyword}", "not a schema, or its name no keyword of Python's"
            )
    if not all(isinstance(keyword, str) and keyword in properties for keyword in required):
        raise lark.UnsupportedSchema(tool, "required", "not all of it are properties")
    return properties, required


def _value(schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean" and not schema.keys() - {"type", *_DEFINITIONS, *_ANNOTATIONS}:
        return '("True" | "False")'
    return lark.json_value(schema)
