"""Reads reasoning before an answer: <think>…</think> (DeepSeek R1, Qwen 3, QwQ). Pure."""

from __future__ import annotations

import re

from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader, drop

MARKS = ("<think>", "</think>")
OPEN, CLOSE = MARKS
CALL = "<tool_call>"
"""The mark of a call that may end reasoning."""
_LOOK_CHARACTERS = 128


def open_in(prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, as some chat templates open it for the model."""
    return prompt[-64:].rstrip().endswith(OPEN)


def is_open(text: str) -> bool:
    """Return whether a text that a model continues ends within reasoning."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def is_begun(text: str) -> bool:
    """Return whether a text that a model continues ends within reasoning that has some text already."""
    return is_open(text) and not text.rstrip().endswith(OPEN)


def read_reasoning(
    reader: TextReader, result: ParseResult, *, inside: bool, begun: bool, call: re.Pattern[str] | None
) -> Reading[None]:
    """Read up to where the answer begins. `inside`: the prompt ends within reasoning; a model may still open it again.
    `begun`: the prompt has some text of the reasoning, which the answer continues. `call`: how a call begins, up to the
    tool's name. Models such as Qwen 3 call without ending their reasoning, so a call of a tool that there is ends it.

    White space after either tag belongs to neither text. If reasoning never ends, there is no answer.
    """
    if not begun:
        yield from reader.read_white(drop if inside else result.add_text)
        if not (yield from reader.optional(OPEN)) and not inside:
            return
        yield from reader.read_white()
    while (yield from reader.read_until(CLOSE, result.add_reasoning, *((CALL,) if call else ()))):
        if (yield from reader.optional(CLOSE)):
            yield from reader.read_white()
            return
        begins = (yield from reader.look(call, _LOOK_CHARACTERS)) if call else None
        if begins is not None and result.is_tool(begins[1]):
            return
        result.add_reasoning(reader.read(len(CALL)))
