"""Mistral's. Its marks are special tokens. Pure.

to v7      [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
from v11   [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…      also with [CALL_ID]id before [ARGS], or without [ARGS]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.frontend.tool_parsers import json_text, lark
from services.frontend.tool_parsers.call_object import call_object
from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Malformed, Reading, Source

MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_CALLS, _ARGS, _ID = MARKS
_NAME = re.compile(r"[0-9A-Za-z_-]+")
_NAME_LIMIT_CHARACTERS = 64


def mistral(source: Source, found: Found) -> Reading[None]:
    """Calls may come behind text."""
    while (yield from source.until(_CALLS, found.text)):
        further = yield from found.attempt(_first)
        while further:  # in a list
            yield from source.white()
            further = yield from source.optional(",")
            if further:
                yield from source.white()
                further = yield from found.attempt(call_object)
            else:
                yield from source.optional("]")
                yield from source.white()


def _first(source: Source, found: Found) -> Reading[None]:
    yield from source.expect(_CALLS)
    yield from source.white()
    if (yield from source.optional("[")):
        yield from source.white()
        yield from call_object(source, found)
    elif (yield from source.peek()) == "{":
        yield from call_object(source, found)
    else:
        yield from _named(source, found)


def _named(source: Source, found: Found) -> Reading[None]:
    name = yield from source.word(_NAME, _NAME_LIMIT_CHARACTERS)
    found.known(name)
    if (yield from source.optional(_ID)):
        yield from source.word(_NAME, _NAME_LIMIT_CHARACTERS)
    yield from source.optional(_ARGS)
    yield from source.white()
    if (yield from source.peek()) != "{":
        raise Malformed("malformed")
    found.begin(name)
    yield from json_text.value(source, found.arguments)
    found.end()


def rules(calls: Sequence[lark.Callable], tokens: lark.Tokens, how: lark.How) -> list[str]:
    """A grammar's, that an answer is held to: the model chooses between the two ways, where it has a token for the
    second."""
    further = "" if how == "one" else '(", " call)*'
    ways, named = [f'(" ")? "[" call {further} "]"'], list[str]()
    if _ARGS in tokens:
        start, args = lark.mark(_CALLS, tokens), lark.mark(_ARGS, tokens)
        ways.append("named" if how == "one" else f"named ({start} named)*")
        with_id = f"({lark.mark(_ID, tokens)} /[0-9A-Za-z]{{9}}/)? " if _ID in tokens else ""
        named = [lark.either("named", len(calls))]
        for at, call in enumerate(calls):
            arguments = lark.value(call.arguments or {"type": "object"})
            named.append(f"named_{at}: {lark.quoted(call.name)} {with_id}{args} {arguments}")
    return [
        "start: TEXT | upto calls" if how == "any" else f"start: {lark.mark(_CALLS, tokens)} calls",
        f"calls: {' | '.join(ways)}",
        *named,
        *lark.upto(_CALLS, tokens),
        *lark.objects(calls, "arguments"),
    ]
