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
from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Malformed, Reading, Source

MARKS = ("<|python_start|>", "<|python_end|>")
_START, _END = MARKS
_NAME = re.compile(r"[0-9A-Za-z_-]+")
_NAME_LIMIT_CHARACTERS = 64
_KEYWORD = re.compile(r"\w+")
_KEYWORD_LIMIT_CHARACTERS = 256


def pythonic(source: Source, found: Found) -> Reading[None]:
    """What does not begin with a list is text."""
    yield from source.white(found.text)
    if (yield from source.peek()) in ("[", "<"):
        further = yield from found.attempt(_first)
        while further:
            yield from source.white()
            further = yield from source.optional(",")
            yield from source.white()
            if further and (yield from source.peek()) != "]":
                further = yield from found.attempt(_call)
            else:
                further = False
                yield from source.optional("]")
                yield from source.optional(_END)
                yield from source.white()
    yield from source.rest(found.text)


def _first(source: Source, found: Found) -> Reading[None]:
    yield from source.optional(_START)
    yield from source.white()
    yield from source.expect("[")
    yield from source.white()
    yield from _call(source, found)


def _call(source: Source, found: Found) -> Reading[None]:
    """Only keyword arguments have a name to go by."""
    name = yield from source.word(_NAME, _NAME_LIMIT_CHARACTERS)
    found.known(name)
    yield from source.white()
    yield from source.expect("(")
    yield from source.white()
    keyword = yield from _keyword(source)
    found.begin(name)
    found.arguments("{")
    while keyword:
        found.arguments(json.dumps(keyword, ensure_ascii=False) + ": ")
        yield from python_text.value(source, found.arguments)
        yield from source.white()
        if not (yield from source.optional(",")):
            break
        yield from source.white()
        keyword = yield from _keyword(source)
        if keyword:
            found.arguments(", ")
    yield from source.expect(")")
    found.arguments("}")
    found.end()


def _keyword(source: Source) -> Reading[str]:
    """With its `=`; "" where the arguments end instead."""
    keyword = yield from source.word(_KEYWORD, _KEYWORD_LIMIT_CHARACTERS)
    if not keyword:
        if (yield from source.peek()) != ")":
            raise Malformed("malformed")
        return ""
    yield from source.white()
    yield from source.expect("=")
    yield from source.white()
    return keyword


_ANNOTATIONS = frozenset({"$schema", "title", "description", "default", "examples", "deprecated"})
_DEFINITIONS = ("$defs", "definitions")
_WORDS = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS, *_ANNOTATIONS}
"""Of an arguments' schema."""


def rules(calls: Sequence[lark.Callable], tokens: lark.Tokens, how: lark.How) -> list[str]:
    """A grammar's, that an answer is held to. What begins like a list is one of calls. Raises lark.Unwritable.

    Arguments come in the schema's order, and none beside those that it names. Their values are JSON, which this format
    is read as too, but for a boolean, which models write as Python has it.
    """
    before, behind = (f"({lark.mark(one, tokens)})? " if one in tokens else "" for one in MARKS)
    further = "" if how == "one" else '(", " call)*'
    first = f"({'|'.join(re.escape(one) for one in ('[', _START))})"
    return [
        "start: calls | TEXT" if how == "any" else "start: calls",
        f'calls: {before}"[" call {further} "]" {behind}',
        f"TEXT: {lark.text(not_first=lark.WHITE + first)}",
        lark.either("call", len(calls)),
        *(rule for at, call in enumerate(calls) for rule in _call_rules(f"call_{at}", call)),
    ]


def _call_rules(rule: str, call: lark.Callable) -> list[str]:
    """Each argument's rule ends with what may follow it."""
    opening = lark.quoted(call.name + "(")
    if call.arguments is None:
        value = lark.value({})
        return [
            f'{rule}: {opening} ({rule}_any (", " {rule}_any)*)? ")"',
            f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {value}",
        ]
    properties, required = _arguments(call.name, call.arguments)
    definitions = {word: call.arguments[word] for word in _DEFINITIONS if word in call.arguments}
    rules = [f'{rule}: {opening} {rule}_0 ")"']
    for at, (keyword, schema) in enumerate(properties.items()):
        argument = f"{lark.quoted(keyword + '=')} {_value({**definitions, **schema})}"
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
        raise lark.Unwritable(tool, word, "cannot be held to where calls are written as Python")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise lark.Unwritable(tool, "properties", "not an object, or `required` is not a list")
    for keyword, one in properties.items():
        if not isinstance(one, dict) or not keyword.isidentifier() or len(keyword) > _KEYWORD_LIMIT_CHARACTERS:
            raise lark.Unwritable(tool, f"properties.{keyword}", "not a schema, or its name no keyword of Python's")
    if not all(isinstance(keyword, str) and keyword in properties for keyword in required):
        raise lark.Unwritable(tool, "required", "not all of it are properties")
    return properties, required


def _value(schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean" and not schema.keys() - {"type", *_DEFINITIONS, *_ANNOTATIONS}:
        return '("True" | "False")'
    return lark.value(schema)
