"""Reads JSON (RFC 8259) and passes its text on as it comes, as far as it is valid. Pure.

What models write instead is passed on as JSON: a comma after the last member, texts in single quotes, True, False and
None, raw control characters in texts, and escapes that JSON does not have, which stand for themselves.
"""

from __future__ import annotations

import json
import re
import string
import sys
from collections.abc import Callable

import msgspec

from services.frontend.tool_parsers.reader import RUN_LIMIT_CHARACTERS, Malformed, Reading, TextReader
from shared.errors import MALFORMED

DEPTH_LIMIT = 64
SCALAR_LIMIT_CHARACTERS = 512
"""Characters of a number at most."""
KEY_LIMIT_CHARACTERS = 512
"""Characters at most, as written, of a text whose value is needed."""

_PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "\"'"}
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

Out = Callable[[str], None]


def value(reader: TextReader, out: Out, depth: int = 0) -> Reading[None]:
    """Read any value, without the white space around it. Raise Malformed after the valid part has been passed on."""
    first = yield from reader.peek()
    if first in _PLAIN:
        yield from text(reader, out)
    elif first == "{":
        yield from _members(reader, out, depth, "}")
    elif first == "[":
        yield from _members(reader, out, depth, "]")
    else:
        out((yield from scalar(reader)))


def scalar(reader: TextReader) -> Reading[str]:
    """Read a number or a constant and return it as JSON. Raise Malformed."""
    word = yield from reader.read_word(_WORD, SCALAR_LIMIT_CHARACTERS)
    word = _PYTHON.get(word, word)
    if _SCALAR.fullmatch(word) is None:
        raise Malformed("malformed")
    return word


def _members(reader: TextReader, out: Out, depth: int, close: str) -> Reading[None]:
    """Read an object or a list."""
    if depth == DEPTH_LIMIT:
        raise Malformed("malformed")
    out(reader.read())
    comma = ""
    while True:
        white: list[str] = []
        yield from reader.read_white(white.append)
        if (yield from reader.peek()) == close:
            out("".join(white) + reader.read())
            return
        out("".join((comma, *white)))
        if close == "}":
            yield from text(reader, out)
            yield from reader.expect_spaced(":", out)
        yield from value(reader, out, depth + 1)
        yield from reader.read_white(out)
        if (yield from reader.peek()) != close:
            yield from reader.expect(",")
        comma = ","


def text(reader: TextReader, out: Out, limit_characters: int = sys.maxsize) -> Reading[None]:
    """Read a text with its quotes. Raise Malformed after the valid part has been passed on."""
    quote = yield from reader.peek()
    if quote not in _PLAIN:
        raise Malformed("malformed")
    reader.read()
    out('"')
    left = limit_characters
    while True:
        first = yield from reader.peek()
        if first == quote:
            reader.read()
            out('"')
            return
        if first == "\\":
            piece = yield from _escape(reader)
        else:
            piece = reader.read_run(_PLAIN[quote], min(left, RUN_LIMIT_CHARACTERS)) or quoted(reader.read())
        left -= len(piece)
        if not piece or left < 0:
            raise Malformed("malformed")
        out(piece)


def _escape(reader: TextReader) -> Reading[str]:
    reader.read()
    kind = yield from reader.peek()
    reader.read()
    if kind == "u":
        digits = yield from hex_digits(reader, 4)
        return f"\\u{digits}" if len(digits) == 4 else quoted(f"\\u{digits}")
    if not kind:
        raise Malformed("malformed")
    if kind in '"\\/bfnrt':
        return f"\\{kind}"
    return kind if kind == "'" else quoted(f"\\{kind}")


def hex_digits(reader: TextReader, most: int) -> Reading[str]:
    """Read hexadecimal digits, perhaps fewer than `most`: a path such as C:\\users has none. Raise Malformed at the end
    of the text."""
    digits = ""
    while len(digits) < most and (digit := (yield from reader.peek())) in string.hexdigits:
        if not digit:
            raise Malformed("malformed")
        digits += reader.read()
    return digits


def quoted(text: str) -> str:
    """Return a text as JSON writes it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def short_text(reader: TextReader) -> Reading[str]:
    """Read a short text and return its value. Raise Malformed if it is too long."""
    written: list[str] = []
    yield from text(reader, written.append, KEY_LIMIT_CHARACTERS)
    return decoded("".join(written))


def decoded(written: str) -> str:
    """Return the value of a text in quotes. Raise Malformed."""
    try:
        return msgspec.json.decode(written, type=str)
    except MALFORMED:  # half a surrogate pair
        raise Malformed("malformed") from None


def whole_value(written: str) -> str:
    """Return a value as JSON from a text that holds nothing else, or is empty. Raise Malformed."""
    reader, read = TextReader(), list[str]()
    reader.feed(written)
    reader.end()
    if written:
        for _ in value(reader, read.append):
            raise AssertionError("a text that has ended is not waited for")
    if not reader.at_end:
        raise Malformed("malformed")
    return "".join(read)
