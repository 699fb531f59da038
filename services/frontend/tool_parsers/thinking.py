"""Thinking before an answer: <think>…</think> (DeepSeek R1, Qwen 3, QwQ). Pure."""

from __future__ import annotations

from services.frontend.tool_parsers.parse_result import Found
from services.frontend.tool_parsers.reader import Reading, Source

MARKS = ("<think>", "</think>")
OPEN, CLOSE = MARKS


def begun(prompt: str) -> bool:
    """Whether a prompt ends within thinking: some templates open it for the model."""
    return prompt[-64:].rstrip().endswith(OPEN)


def thinking(source: Source, found: Found, *, inside: bool) -> Reading[None]:
    """Up to where the answer begins. `inside`: as `begun`; a model may open it once more all the same.

    White space behind either tag belongs to neither text. Thinking that never ends is all there is.
    """
    yield from source.white(None if inside else found.text)
    if not (yield from source.optional(OPEN)) and not inside:
        return
    yield from source.white()
    if (yield from source.until(CLOSE, found.reasoning)):
        yield from source.expect(CLOSE)
        yield from source.white()
