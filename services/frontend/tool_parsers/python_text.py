"""Reads Python literals and passes them on as JSON. Pure.

These are texts in either quotes, numbers as in JSON, True, False and None (and JSON's words for them), lists, and dicts
whose keys are texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.frontend.tool_parsers.json_text import DEPTH_LIMIT, SCALAR_LIMIT_CHARACTERS, hex_digits
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader

_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES |= {one: one for one in "\\'\""}
_DIGITS = {"x": 2, "u": 4, "U": 8}

Out = Callable[[str], None]


def value(reader: TextReader, out: Out, depth: int = 0) -> Reading[None]:
    """Read any literal, without the white space around it. Raise Malformed after the valid part has been passed on."""
    first = yield from reader.peek()
    if first in _PLAIN:
        yield from _text(reader, out)
    elif first in ("[", "{"):
        yield from _members(reader, out, depth, "]" if first == "[" else "}")
    else:
        word = yield from reader.read_word(_WORD, SCALAR_LIMIT_CHARACTERS)
        if word not in _NAMES and _NUMBER.fullmatch(word) is None:
            raise Malformed("malformed")
        out(_NAMES.get(word, word))


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
        yield from value(reader, out, depth + 1)
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
            out(_quoted(plain))
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
        return _quoted(_ESCAPES.get(kind, "\\" + kind))
    digits = yield from hex_digits(reader, _DIGITS[kind])
    code = int(digits, 16) if len(digits) == _DIGITS[kind] else -1
    if not 0 <= code <= 0x10FFFF:
        return _quoted(f"\\{kind}{digits}")
    if code > 0xFFFF:
        return chr(code)
    return f"\\u{code:04x}"  # perhaps half a surrogate pair, which only a JSON escape can express


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
