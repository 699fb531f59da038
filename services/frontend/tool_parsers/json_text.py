"""Reads JSON (RFC 8259) and passes its text on as it comes, as far as it is valid. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import msgspec

from services.frontend.tool_parsers.reader import RUN_LIMIT_CHARACTERS, Malformed, Reading, TextReader

DEPTH_LIMIT = 64
SCALAR_LIMIT_CHARACTERS = 512
"""Characters of a number at most."""
KEY_LIMIT_CHARACTERS = 512
"""Characters at most, as written, of a text whose value is needed."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

Out = Callable[[str], None]


def value(reader: TextReader, out: Out, depth: int = 0) -> Reading[None]:
    """Read any value, without the white space around it. Raise Malformed after the valid part has been passed on."""
    first = yield from reader.peek()
    if first == '"':
        yield from text(reader, out)
    elif first == "{":
        yield from _members(reader, out, depth, "}")
    elif first == "[":
        yield from _members(reader, out, depth, "]")
    else:
        scalar = yield from reader.read_word(_WORD, SCALAR_LIMIT_CHARACTERS)
        if _SCALAR.fullmatch(scalar) is None:
            raise Malformed("malformed")
        out(scalar)


def _members(reader: TextReader, out: Out, depth: int, close: str) -> Reading[None]:
    """Read an object or a list."""
    if depth == DEPTH_LIMIT:
        raise Malformed("malformed")
    out(reader.read())
    yield from reader.read_white(out)
    if (yield from reader.peek()) == close:
        out(reader.read())
        return
    while True:
        if close == "}":
            yield from text(reader, out)
            yield from reader.expect_spaced(":", out)
        yield from value(reader, out, depth + 1)
        yield from reader.read_white(out)
        if (yield from reader.peek()) == close:
            out(reader.read())
            return
        yield from reader.expect_spaced(",", out)


def text(reader: TextReader, out: Out, limit_characters: int = sys.maxsize) -> Reading[None]:
    """Read a text with its quotes. Raise Malformed after the valid part has been passed on."""
    yield from reader.expect('"')
    out('"')
    left = limit_characters
    while True:
        first = yield from reader.peek()
        if first == '"':
            out(reader.read())
            return
        piece = (
            (yield from _escape(reader)) if first == "\\" else reader.read_run(_PLAIN, min(left, RUN_LIMIT_CHARACTERS))
        )
        left -= len(piece)
        if not piece or left < 0:
            raise Malformed("malformed")
        out(piece)


def _escape(reader: TextReader) -> Reading[str]:
    escape = reader.read() + (yield from reader.peek())
    reader.read()
    if escape[1:] == "u":
        for _ in range(4):
            escape += yield from reader.peek()
            reader.read()
        if _HEX.fullmatch(escape[2:]) is None:
            raise Malformed("malformed")
    elif escape[1:] == "" or escape[1:] not in '"\\/bfnrt':
        raise Malformed("malformed")
    return escape


def short_text(reader: TextReader) -> Reading[str]:
    """Read a short text and return its value. Raise Malformed if it is too long."""
    written: list[str] = []
    yield from text(reader, written.append, KEY_LIMIT_CHARACTERS)
    try:
        return msgspec.json.decode("".join(written), type=str)
    except msgspec.DecodeError:  # half a surrogate pair
        raise Malformed("malformed") from None
