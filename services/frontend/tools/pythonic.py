"""Llama 4, Llama 3.2, ToolACE, OLMo 3: the answer begins with a Python list of calls, [f(a=1, b="x"), g()]. Pure.

Values are literals; they go out as JSON, character by character. Llama 4 may put <|python_start|> before the list and
<|python_end|> behind it.
"""

from __future__ import annotations

import json
import re

from services.frontend.tools import python_text
from services.frontend.tools.found import Found
from services.frontend.tools.source import Malformed, Reading, Source

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
