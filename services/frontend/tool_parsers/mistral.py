"""Calls of Mistral's models, whose marks are special tokens. Pure.

up to v7   [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
from v11   [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]…      also with [CALL_ID]id before [ARGS], or without [ARGS]
"""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.tool_parsers import json_text, lark
from services.frontend.tool_parsers.call_object import (
    call_object,
    read_fence,
    read_rest_of_calls,
    whole_arguments,
)
from services.frontend.tool_parsers.parse_result import NAME, NAME_LIMIT_CHARACTERS, ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader

MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_CALLS, _ARGS, _ID = MARKS


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read text and calls; calls may come after text."""
    while (yield from reader.read_until(_CALLS, result.add_text)):
        further = yield from result.attempt_call(_first)
        while further:  # in a list
            further = yield from reader.optional_spaced(",")
            if further and (yield from reader.peek()) != "]":
                further = yield from result.attempt_call(call_object)
            else:
                further = False
                yield from read_rest_of_calls(reader)


def _first(reader: TextReader, result: ParseResult) -> Reading[None]:
    yield from reader.expect(_CALLS)
    yield from read_fence(reader)
    if (yield from reader.optional_spaced("[")) or (yield from reader.peek()) == "{":
        yield from call_object(reader, result)
    else:
        yield from _named(reader, result)


def _named(reader: TextReader, result: ParseResult) -> Reading[None]:
    name = yield from result.read_tool_name()
    if (yield from reader.optional(_ID)):
        yield from reader.read_word(NAME, NAME_LIMIT_CHARACTERS)
    has_mark = yield from reader.optional(_ARGS)
    yield from reader.read_white()
    first = yield from reader.peek()
    if first == "{":
        result.begin_call(name)
        yield from json_text.value(reader, result.add_arguments)
    elif has_mark and (first == "[" or (reader.at_end and not reader.is_short)):
        result.begin_call(name)
        result.add_arguments("{}")
    else:
        arguments = yield from whole_arguments(reader, takes_text=result.takes_text(name))
        result.begin_call(name)
        result.add_arguments(arguments)
    result.end_call()


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """Return the Lark rules that an answer must follow. The model may use either form if it has a token for the
    second."""
    further = lark.further('", " call', how)
    ways, named = [f'(" ")? "[" call {further} "]"'], list[str]()
    if _ARGS in tokens:
        start, args = lark.mark_symbol(_CALLS, tokens), lark.mark_symbol(_ARGS, tokens)
        ways.append(f"named {lark.further(f'{start} named', how)}")
        with_id = f"({lark.mark_symbol(_ID, tokens)} /[0-9A-Za-z]{{9}}/)? " if _ID in tokens else ""
        named = [lark.either("named", len(calls))]
        for at, call in enumerate(calls):
            arguments = lark.json_value(call.arguments or {"type": "object"})
            named.append(f"named_{at}: {lark.quote(call.name)} {with_id}{args} {arguments}")
    return [
        "start: TEXT | upto calls" if how == "any" else f"start: {lark.mark_symbol(_CALLS, tokens)} calls",
        f"calls: {' | '.join(ways)}",
        *named,
        *lark.upto(_CALLS, tokens),
        *lark.json_calls(calls, "arguments"),
    ]
