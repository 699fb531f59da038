"""What LangChain's programs ask: a tool, and the sum of a stream."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def add_up(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    assert len(chunks) > 2, "it streams"
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole
