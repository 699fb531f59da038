"""A call as a JSON object, {"name": …, "arguments": {…}}, its keys in either order. Pure.

Models write more into it ("type", "id"), which is passed over.
"""

from __future__ import annotations

from services.frontend.tool_parsers import json_text
from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Malformed, Reading, Source


def call_object(source: Source, found: Found) -> Reading[None]:
    """Arguments go out as they come, once the name is known; where they come first, they wait for it. Llama's word for
    them is "parameters". Raises Malformed."""
    name = ""
    waiting: list[str] = []
    complete = False
    yield from source.expect("{")
    while True:
        yield from source.white()
        key = yield from json_text.short_text(source)
        yield from source.white()
        yield from source.expect(":")
        yield from source.white()
        if key == "name" and not name:
            name = yield from json_text.short_text(source)
            found.known(name)
            if waiting:
                found.begin(name)
                found.arguments("".join(waiting))
                complete = True
        elif key in ("arguments", "parameters") and not waiting and not complete:
            if (yield from source.peek()) != "{":
                raise Malformed("malformed")
            if name:
                found.begin(name)
            yield from json_text.value(source, found.arguments if name else waiting.append)
            complete = bool(name)
        else:
            yield from json_text.value(source, _pass_over)
        yield from source.white()
        if not (yield from source.optional(",")):
            break
    yield from source.expect("}")
    if not complete:
        raise Malformed("malformed")
    found.end()


def _pass_over(_text: str) -> None:
    """Of keys that say nothing about the call."""
