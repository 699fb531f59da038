"""Calls of Hermes 2 and later, Qwen 2.5 and Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>… Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.call_object import call_objects
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader

MARKS = ("<tool_call>", "</tool_call>")
_OPEN, _CLOSE = MARKS
BEGINNING = re.compile(_OPEN + r'\s*\{\s*"name"\s*:\s*"([^"]+)"')
"""How a call begins, up to the tool's name."""
_REASONED = "</think>"
"""The end of reasoning that a call stands in."""


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read text and calls. A call counts even if the model ends its turn without the closing tag; a list of calls may
    stand between the tags."""
    while (yield from reader.read_until(_OPEN, result.add_text)):
        if (yield from call_objects(reader, result, lambda: reader.expect(_OPEN), ",")):
            yield from reader.optional_spaced(_CLOSE)
            yield from reader.optional_spaced(_REASONED)


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """Return the Lark rules that an answer must follow."""
    return [*frame(tokens, how), *lark.json_calls(calls, "arguments")]


def frame(tokens: lark.Tokens, how: lark.AnswerKind, *not_in_text: str) -> list[str]:
    """Return the rules of text and calls in tags, in which `call` is what stands between them."""
    start = {"one": "tagged", "some": "calls", "any": "(upto body)* TEXT", "or": "calls | @content"}[how]
    return [
        f"start: {start}",
        "calls: tagged " + lark.further('"\\n" tagged', how),
        f"tagged: {lark.mark_symbol(_OPEN, tokens)} body",
        f'body: "\\n" call "\\n" {lark.mark_symbol(_CLOSE, tokens)}',
        *lark.upto(_OPEN, tokens, *not_in_text),
    ]
