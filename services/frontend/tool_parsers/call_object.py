"""Parses calls written as JSON objects, {"name": …, "arguments": {…}}, with its keys in either order. Pure.

The name may also be under "function", as a text or in an object that holds the whole call. Llama calls the arguments
"parameters", other models "args" or "input". Without any of these, the other members are the arguments, but for those
that describe a call ("type", "id"), which are ignored.

    arguments that are missing, null, "", [] or {}       {}
    an object, also as Python writes it                  the object, character by character (json_text.py)
    an object in a text                                  that object, once the text has ended
"""

from __future__ import annotations

import json
from collections.abc import Callable

from services.frontend.tool_parsers import json_text
from services.frontend.tool_parsers.lark import WHITE
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader, drop

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OF_CALLS = ("type", "id", "index", "call_id", "tool_call_id", "description")
"""Members that describe a call."""
_NONE = ("", "null", "[]", "{}")
"""What models write for no arguments."""
_BEGINNINGS = ("{", "[", '"', "'", "n", "N")
"""How arguments may begin; numbers and truth values are none."""
_FENCES = ("```json", "```python", "```tool_code", "```")
FENCE = f"(```(json|python|tool_code)?{WHITE})?"
"""The beginning of a code fence, as a regular expression."""


class _Call:
    """A call of which some keys were read."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments: str | None = None
        """The arguments that wait for the name."""
        self.has_arguments = False
        self.others: list[str] = []
        """The other members, which are the arguments if there are no others."""


def call_object(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read one call. Arguments are passed on as they come once the name is known; if they come first, they wait for it.
    The last brace may be missing after arguments. Raise Malformed."""
    call = _Call()
    yield from _members(reader, result, call)
    if not call.name:
        raise Malformed("malformed")
    if not call.has_arguments:
        result.begin_call(call.name)
        result.add_arguments(call.arguments or "{" + ", ".join(call.others) + "}")
    result.end_call()


def _members(reader: TextReader, result: ParseResult, call: _Call) -> Reading[None]:
    yield from reader.expect("{")
    yield from reader.read_white()
    while (yield from reader.peek()) in ('"', "'"):
        key = yield from json_text.short_text(reader)
        yield from reader.expect_spaced(":")
        first = yield from reader.peek()
        if key == "function" and first == "{" and not call.name:
            yield from _members(reader, result, call)
        elif key in _NAMES and not call.name:
            call.name = result.tool_name((yield from json_text.short_text(reader)))
        elif key in _ARGUMENTS and call.arguments is None and not call.has_arguments:
            yield from _arguments(reader, result, call)
        elif key in _OF_CALLS:
            yield from json_text.value(reader, drop)
        else:
            written = [json.dumps(key, ensure_ascii=False), ": "]
            yield from json_text.value(reader, written.append)
            call.others.append("".join(written))
        if not (yield from reader.optional_spaced(",")):
            break
    if not (yield from reader.optional("}")) and not call.has_arguments:
        raise Malformed("malformed")


def _arguments(reader: TextReader, result: ParseResult, call: _Call) -> Reading[None]:
    if call.name and (yield from reader.peek()) == "{":
        result.begin_call(call.name)
        yield from json_text.value(reader, result.add_arguments)
        call.has_arguments = True
    else:
        call.arguments = yield from whole_arguments(reader, takes_text=result.takes_text(call.name))


def whole_arguments(reader: TextReader, *, takes_text: bool = False) -> Reading[str]:
    """Read arguments in any of their forms; return them as a JSON object. `takes_text`: a text is the tool's input.
    Raise Malformed."""
    if (yield from reader.peek()) not in _BEGINNINGS:
        raise Malformed("malformed")
    written: list[str] = []
    yield from json_text.value(reader, written.append)
    text = "".join(written)
    if text.startswith('"') and takes_text:
        return f'{{"input": {text}}}'
    if text.startswith('"'):
        text = json_text.whole_value(json_text.decoded(text).strip())
    if text in _NONE:
        return "{}"
    if not text.startswith("{"):
        raise Malformed("malformed")
    return text


def read_fence(reader: TextReader) -> Reading[None]:
    """Read the beginning or the end of a code fence around calls, with the white space around it, if there is one."""
    yield from reader.read_white()
    if (yield from reader.peek()) != "`":
        return
    for fence in _FENCES:
        if (yield from reader.optional(fence)):
            break
    yield from reader.read_white()


def call_objects(
    reader: TextReader, result: ParseResult, mark: Callable[[], Reading[object]], *separators: str
) -> Reading[bool]:
    """Read calls in a row, with any of the separators between them, and what models write too much after them. Return
    whether there was one. `mark` reads what comes before the first; then a fence and a bracket may come."""

    def first(reader: TextReader, result: ParseResult) -> Reading[None]:
        yield from mark()
        yield from read_fence(reader)
        yield from reader.optional_spaced("[")
        yield from call_object(reader, result)

    found = further = yield from result.attempt_call(first)
    while further:
        yield from reader.read_white()
        while (yield from reader.peek()) in separators:
            reader.read()
            yield from reader.read_white()
        further = (yield from reader.peek()) == "{" and (yield from result.attempt_call(call_object))
    if found:
        yield from read_rest_of_calls(reader)
    return found


def read_rest_of_calls(reader: TextReader) -> Reading[None]:
    """Read what models write too much after a call: closing brackets and the end of a code fence."""
    while True:
        yield from read_fence(reader)
        if (yield from reader.peek()) not in ("}", "]"):
            return
        reader.read()
