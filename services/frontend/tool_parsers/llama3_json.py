"""Llama 3.1 to 3.3: the whole answer is {"name": …, "parameters": {…}}; several with `;` between them. Pure.

`<|python_tag|>` may stand before it, then behind other text too.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.call_object import call_object
from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Reading, Source

MARKS = ("<|python_tag|>",)
_TAG = MARKS[0]


def llama3_json(source: Source, found: Found) -> Reading[None]:
    """An answer that is JSON, and no call, is text; it is kept back until that shows."""
    yield from source.white(found.text)
    if (yield from source.peek()) == "{":
        yield from _calls(source, found)
    while (yield from source.until(_TAG, found.text)):
        yield from _calls(source, found)


def _calls(source: Source, found: Found) -> Reading[None]:
    while (yield from found.attempt(_call)):
        yield from source.white()
        if (yield from source.optional(";")):
            yield from source.white()
        if (yield from source.peek()) != "{":
            return


def _call(source: Source, found: Found) -> Reading[None]:
    if (yield from source.optional(_TAG)):
        yield from source.white()
    yield from call_object(source, found)


def rules(calls: Sequence[lark.Callable], tokens: lark.Tokens, how: lark.How) -> list[str]:
    """A grammar's, that an answer is held to. What begins like an object is a call."""
    tag = f"({lark.mark(_TAG, tokens)})? " if _TAG in tokens else ""
    start = {"one": f"{tag}call", "some": f"{tag}calls", "any": "calls | TEXT | upto calls"}[how]
    return [
        f"start: {start}",
        'calls: call ("; " call)*',
        *lark.upto(_TAG, tokens, not_first=lark.WHITE + "\\{"),
        *lark.objects(calls, "parameters"),
    ]
