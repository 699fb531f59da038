"""Reads reasoning before an answer: <think>…</think> (DeepSeek R1, Qwen 3, QwQ). Pure."""

from __future__ import annotations

from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader, drop

MARKS = ("<think>", "</think>")
OPEN, CLOSE = MARKS


def open_in(prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, as some chat templates open it for the model."""
    return prompt[-64:].rstrip().endswith(OPEN)


def is_open(text: str) -> bool:
    """Return whether a text that a model continues ends within reasoning."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def is_begun(text: str) -> bool:
    """Return whether a text that a model continues ends within reasoning that has some text already."""
    return is_open(text) and not text.rstrip().endswith(OPEN)


def read_reasoning(reader: TextReader, result: ParseResult, *, inside: bool, begun: bool) -> Reading[None]:
    """Read up to where the answer begins. `inside`: the prompt ends within reasoning; a model may still open it again.
    `begun`: the prompt has some text of the reasoning, which the answer continues.

    White space after either tag belongs to neither text. If reasoning never ends, there is no answer.
    """
    if not begun:
        yield from reader.read_white(drop if inside else result.add_text)
        if not (yield from reader.optional(OPEN)) and not inside:
            return
        yield from reader.read_white()
    if (yield from reader.read_until(CLOSE, result.add_reasoning)):
        yield from reader.expect(CLOSE)
        yield from reader.read_white()
