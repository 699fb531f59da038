"""Parses a call written as a JSON object, {"name": …, "arguments": {…}}, with its keys in either order. Pure.

Other keys that models write ("type", "id") are ignored.
"""

from __future__ import annotations

from services.frontend.tool_parsers import json_text
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader, drop


def call_object(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read one call. Arguments are passed on as they come once the name is known; if they come first, they wait for it.
    Llama calls them "parameters". Raise Malformed."""
    name = ""
    waiting: list[str] = []
    complete = False
    yield from reader.expect("{")
    yield from reader.read_white()
    while True:
        key = yield from json_text.short_text(reader)
        yield from reader.expect_spaced(":")
        if key == "name" and not name:
            name = yield from json_text.short_text(reader)
            result.check_tool_name(name)
            if waiting:
                result.begin_call(name)
                result.add_arguments("".join(waiting))
                complete = True
        elif key in ("arguments", "parameters") and not waiting and not complete:
            if (yield from reader.peek()) != "{":
                raise Malformed("malformed")
            if name:
                result.begin_call(name)
            yield from json_text.value(reader, result.add_arguments if name else waiting.append)
            complete = bool(name)
        else:
            yield from json_text.value(reader, drop)
        if not (yield from reader.optional_spaced(",")):
            break
    yield from reader.expect("}")
    if not complete:
        raise Malformed("malformed")
    result.end_call()
