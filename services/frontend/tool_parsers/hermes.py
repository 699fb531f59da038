"""Hermes 2 and later, Qwen 2.5, Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, again and again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.call_object import call_object
from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Reading, Source

MARKS = ("<tool_call>", "</tool_call>")
_OPEN, _CLOSE = MARKS


def hermes(source: Source, found: Found) -> Reading[None]:
    """A model that ends its turn without the closing tag has made its call all the same."""
    while (yield from source.until(_OPEN, found.text)):
        if (yield from found.attempt(_call)):
            yield from source.white()
            yield from source.optional(_CLOSE)
            yield from source.white()


def _call(source: Source, found: Found) -> Reading[None]:
    yield from source.expect(_OPEN)
    yield from source.white()
    yield from call_object(source, found)


def rules(calls: Sequence[lark.Callable], tokens: lark.Tokens, how: lark.How) -> list[str]:
    """A grammar's, that an answer is held to."""
    start = {"one": "tagged", "some": "calls", "any": "(upto body)* TEXT", "or": "calls | @content"}[how]
    return [
        f"start: {start}",
        'calls: tagged ("\\n" tagged)*',
        f"tagged: {lark.mark(_OPEN, tokens)} body",
        f'body: "\\n" call "\\n" {lark.mark(_CLOSE, tokens)}',
        *lark.upto(_OPEN, tokens),
        *lark.objects(calls, "arguments"),
    ]
