"""JSON (RFC 8259) as a grammar: passes a value's text on as it comes, as far as it is JSON. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import msgspec

from services.frontend.tool_parsers.reader import SPAN_CHARACTERS, Malformed, Reading, Source

DEPTH_LIMIT = 64
SCALAR_LIMIT_CHARACTERS = 512
"""Of a number."""
KEY_LIMIT_CHARACTERS = 512
"""Of a text that is looked at, as it is written."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

Out = Callable[[str], None]


def value(source: Source, out: Out, depth: int = 0) -> Reading[None]:
    """Any value, without the white space around it. Raises Malformed behind what was passed on."""
    first = yield from source.peek()
    if first == '"':
        yield from text(source, out)
    elif first == "{":
        yield from _members(source, out, depth, "}")
    elif first == "[":
        yield from _members(source, out, depth, "]")
    else:
        scalar = yield from source.word(_WORD, SCALAR_LIMIT_CHARACTERS)
        if _SCALAR.fullmatch(scalar) is None:
            raise Malformed("malformed")
        out(scalar)


def _members(source: Source, out: Out, depth: int, close: str) -> Reading[None]:
    """Of an object or a list."""
    if depth == DEPTH_LIMIT:
        raise Malformed("malformed")
    out(source.take())
    yield from source.white(out)
    if (yield from source.peek()) == close:
        out(source.take())
        return
    while True:
        if close == "}":
            yield from text(source, out)
            yield from _mark(source, out, ":")
        yield from value(source, out, depth + 1)
        yield from source.white(out)
        if (yield from source.peek()) == close:
            out(source.take())
            return
        yield from _mark(source, out, ",")


def _mark(source: Source, out: Out, mark: str) -> Reading[None]:
    """One character and the white space around it."""
    yield from source.white(out)
    yield from source.expect(mark)
    out(mark)
    yield from source.white(out)


def text(source: Source, out: Out, limit_characters: int = sys.maxsize) -> Reading[None]:
    """A text with its quotes. Raises Malformed behind what was passed on."""
    yield from source.expect('"')
    out('"')
    left = limit_characters
    while True:
        first = yield from source.peek()
        if first == '"':
            out(source.take())
            return
        piece = (yield from _escape(source)) if first == "\\" else source.span(_PLAIN, min(left, SPAN_CHARACTERS))
        left -= len(piece)
        if not piece or left < 0:
            raise Malformed("malformed")
        out(piece)


def _escape(source: Source) -> Reading[str]:
    escape = source.take() + (yield from source.peek())
    source.take()
    if escape[1:] == "u":
        for _ in range(4):
            escape += yield from source.peek()
            source.take()
        if _HEX.fullmatch(escape[2:]) is None:
            raise Malformed("malformed")
    elif escape[1:] == "" or escape[1:] not in '"\\/bfnrt':
        raise Malformed("malformed")
    return escape


def short_text(source: Source) -> Reading[str]:
    """What a text says. Raises Malformed where it is long."""
    written: list[str] = []
    yield from text(source, written.append, KEY_LIMIT_CHARACTERS)
    try:
        return msgspec.json.decode("".join(written), type=str)
    except msgspec.DecodeError:  # half a surrogate pair
        raise Malformed("malformed") from None
