"""Calls of Llama 3.1 to 3.3: the whole answer is {"name": …, "parameters": {…}}, several with `;` between them. Pure.

`<|python_tag|>` may come before the first; then other text may come before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.call_object import FENCE, call_objects
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader

MARKS = ("<|python_tag|>",)
_TAG = MARKS[0]
_BEGINNINGS = ("{", "[", "`")


def parse(reader: TextReader, result: ParseResult) -> Reading[None]:
    """Read text and calls. JSON that is no call is text, held back until that is certain."""
    yield from reader.read_white(result.add_text)
    if (yield from reader.peek()) in _BEGINNINGS:
        yield from _calls(reader, result)
    while (yield from reader.read_until(_TAG, result.add_text)):
        yield from _calls(reader, result)


def _calls(reader: TextReader, result: ParseResult) -> Reading[None]:
    yield from call_objects(reader, result, lambda: reader.optional_spaced(_TAG), ";", ",")


def rules(calls: Sequence[lark.CallableTool], tokens: lark.Tokens, how: lark.AnswerKind) -> list[str]:
    """Return the Lark rules that an answer must follow. Text that begins like an object is a call."""
    tag = f"({lark.mark_symbol(_TAG, tokens)})? " if _TAG in tokens else ""
    start = {"one": f"{tag}call", "some": f"{tag}calls", "any": "calls | TEXT | upto calls"}[how]
    return [
        f"start: {start}",
        "calls: call " + lark.further('"; " call', how),
        *lark.upto(_TAG, tokens, not_first=f"{lark.WHITE}{FENCE}(\\[{lark.WHITE})?\\{{"),
        *lark.json_calls(calls, "parameters"),
    ]
