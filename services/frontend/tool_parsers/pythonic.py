"""Calls of Llama 4, Llama 3.2 and ToolACE: the answer begins with a Python list, [f(a=1, b="x"), g()]. Pure.

Values are literals, passed on as JSON, character by character. Llama 4 may write <|python_start|> before the list and
<|python_end|> after it. OLMo 3 writes calls anywhere in an answer, each in a line:

    <function_calls>
    f(a=1, b="x")
    g()
    </function_calls>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.frontend.tool_parsers import json_text, lark
from services.frontend.tool_parsers.call_object import FENCE, read_fence, read_rest_of_calls
from services.frontend.tool_parsers.json_text import DEPTH_LIMIT, Out, hex_digits, quoted
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader

MARKS = ("<|python_start|>", "<|python_end|>", "<function_calls>", "</function_calls>")
_START, _END, _LINES, _LINES_END = MARKS
_KEYWORD = re.compile(r"\w+")
_KEYWORD_LIMIT_CHARACTERS = 256

CallReader = Callable[[TextReader, ParseResult], Reading[None]]


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read calls, then text. An answer that does not begin with a list is text, up to calls in lines."""
    yield from reader.read_white(result.add_text)
    first = yield from reader.peek()
    if first in ("[", "`") or (first == "<" and not (yield from reader.goes_on_with(_LINES))):
        yield from _calls(reader, result, _first, _END)
    while (yield from reader.read_until(_LINES, result.add_text)):
        yield from _calls(reader, result, _first_line, _LINES_END)


def _calls(reader: TextReader, result: ParseResult, first: CallReader, end: str) -> Reading[None]:
    """Read calls, with commas or, in lines, nothing between them."""
    further = yield from result.attempt_call(first)
    while further:
        further = (yield from reader.optional_spaced(",")) or end == _LINES_END
        if further and (yield from reader.peek()) not in ("", "]", "<"):
            further = yield from result.attempt_call(_call)
        else:
            further = False
            yield from read_rest_of_calls(reader)
            yield from reader.optional_spaced(end)


def _first(reader: TextReader, result: ParseResult) -> Reading[None]:
    yield from reader.optional(_START)
    yield from read_fence(reader)
    yield from reader.expect_spaced("[")
    yield from _call(reader, result)


def _first_line(reader: TextReader, result: ParseResult) -> Reading[None]:
    yield from reader.expect(_LINES)
    yield from reader.optional_spaced("[")
    yield from _call(reader, result)


def _call(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read one call with keyword arguments, or with one dict of them; other positional ones have no name."""
    name = yield from result.read_tool_name()
    yield from reader.expect_spaced("(")
    if (yield from reader.peek()) == "{":
        result.begin_call(name)
        yield from literal(reader, result.add_arguments)
        yield from reader.expect_spaced(")")
        result.end_call()
        return
    keyword = yield from _keyword(reader)
    result.begin_call(name)
    result.add_arguments("{")
    while keyword:
        result.add_arguments(json.dumps(keyword, ensure_ascii=False) + ": ")
        yield from literal(reader, result.add_arguments)
        if not (yield from reader.optional_spaced(",")):
            break
        keyword = yield from _keyword(reader)
        if keyword:
            result.add_arguments(", ")
    yield from reader.expect(")")
    result.add_arguments("}")
    result.end_call()


def _keyword(reader: TextReader) -> Reading[str]:
    """Read a keyword and its `=`; "" if the arguments end."""
    keyword = yield from reader.read_word(_KEYWORD, _KEYWORD_LIMIT_CHARACTERS)
    if not keyword:
        if (yield from reader.peek()) != ")":
            raise Malformed("malformed")
        return ""
    yield from reader.expect_spaced("=")
    return keyword


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """Return the Lark rules that an answer must follow. Text that begins like a list is one of calls.

    Arguments come in the order of the schema, and it must name all of them. Their values are JSON, which the parser
    also accepts, except for booleans, which models write as Python does. Raise lark.UnsupportedSchema.
    """
    before, after = (f"({lark.mark_symbol(one, tokens)})? " if one in tokens else "" for one in (_START, _END))
    further = lark.further('", " call', how)
    first = f"({'|'.join(re.escape(one) for one in ('[', _START))})"
    return [
        "start: calls | (upto lines)* TEXT" if how == "any" else "start: calls",
        f'calls: {before}"[" call {further} "]" {after}',
        f'lines: "\\n"? call ("\\n" call)* "\\n"? {lark.mark_symbol(_LINES_END, tokens)}',
        *lark.upto(_LINES, tokens, not_first=lark.WHITE + FENCE + first),
        lark.either("call", len(calls)),
        *(rule for at, call in enumerate(calls) for rule in _call_rules(f"call_{at}", call)),
    ]


def _call_rules(rule: str, call: lark.CallableTool) -> list[str]:
    """Return the rules of one call; the rule of each argument ends with what may follow it."""
    opening = lark.quote(call.name + "(")
    if call.arguments is None:
        value = lark.json_value({})
        return [
            f'{rule}: {opening} ({rule}_any (", " {rule}_any)*)? ")"',
            f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ {value}",
        ]
    properties, required = _arguments(call.name, call.arguments)
    definitions = {word: call.arguments[word] for word in lark.DEFINITIONS if word in call.arguments}
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
    """Return the schemas of arguments by keyword, and the required keywords. Raise lark.UnsupportedSchema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for word in sorted(schema.keys() - lark.OBJECT_WORDS):
        raise lark.UnsupportedSchema(tool, word, "this keyword is not supported for models that write calls as Python")
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise lark.UnsupportedSchema(tool, "properties", "must be an object, and `required` a list")
    for keyword, one in properties.items():
        if not isinstance(one, dict) or not keyword.isidentifier() or len(keyword) > _KEYWORD_LIMIT_CHARACTERS:
            raise lark.UnsupportedSchema(
                tool, f"properties.{keyword}", "must be a schema, and its name a Python identifier"
            )
    if not all(isinstance(keyword, str) and keyword in properties for keyword in required):
        raise lark.UnsupportedSchema(tool, "required", "every name in it must be one of `properties`")
    return properties, required


def _value(schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean" and not schema.keys() - {"type", *lark.DEFINITIONS, *lark.ANNOTATIONS}:
        return '("True" | "False")'
    return lark.json_value(schema)


# --- literals

_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES |= {one: one for one in "\\'\""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


def literal(reader: TextReader, out: Out, depth: int = 0) -> Reading[None]:
    """Read any literal of Python, without the white space around it, and pass it on as JSON. Raise Malformed after the
    valid part has been passed on.

    These are texts in either quotes, numbers as in JSON, True, False and None (and JSON's words for them), lists, and
    dicts whose keys are texts.
    """
    first = yield from reader.peek()
    if first in _PLAIN:
        yield from _text(reader, out)
    elif first in ("[", "{"):
        yield from _members(reader, out, depth, "]" if first == "[" else "}")
    else:
        out((yield from json_text.scalar(reader)))


def _members(reader: TextReader, out: Out, depth: int, close: str) -> Reading[None]:
    """Read a list or a dict; a comma may come after the last member."""
    if depth == DEPTH_LIMIT:
        raise Malformed("malformed")
    out(reader.read())
    yield from reader.read_white()
    separator = ""
    while (yield from reader.peek()) != close:
        out(separator)
        separator = ", "
        if close == "}":
            if (yield from reader.peek()) not in _PLAIN:
                raise Malformed("malformed")
            yield from _text(reader, out)
            yield from reader.expect_spaced(":")
            out(": ")
        yield from literal(reader, out, depth + 1)
        if not (yield from reader.optional_spaced(",")):
            break
    yield from reader.expect(close)
    out(close)


def _text(reader: TextReader, out: Out) -> Reading[None]:
    quote = reader.read()
    out('"')
    while True:
        first = yield from reader.peek()
        if plain := reader.read_run(_PLAIN[quote]):
            out(quoted(plain))
        elif first == "\\":
            out((yield from _escape(reader)))
        elif first == quote:
            reader.read()
            out('"')
            return
        else:
            raise Malformed("malformed")


def _escape(reader: TextReader) -> Reading[str]:
    """Read an escape; return it as JSON writes it. An escape that Python does not know stands for itself."""
    reader.read()
    kind = yield from reader.peek()
    reader.read()
    if kind not in _DIGITS:
        return quoted(_ESCAPES.get(kind, "\\" + kind))
    digits = yield from hex_digits(reader, _DIGITS[kind])
    code = int(digits, 16) if len(digits) == _DIGITS[kind] else -1
    if not 0 <= code <= 0x10FFFF:
        return quoted(f"\\{kind}{digits}")
    if code > 0xFFFF:
        return chr(code)
    return f"\\u{code:04x}"  # perhaps half a surrogate pair, which only a JSON escape can express
