"""Answers of models, and what a stream makes of them when their text comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from services.frontend.output.output import Delta
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🚰"}}\n</tool_call>'
THOUGHTFUL = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
ANSWERS = [
    "",
    "hello, Mühle 🚰",
    "<think>\nwhy not\n</think>\n\nhello",
    "<think>never ends",
    CALL,
    f"<think>hm</think>I look.\n{CALL}\n{CALL}",
    f"I look.\n{CALL}\nand again, behind it {CALL} and behind that",
    '<tool_call>{"name": "weather", "arguments": {"city": "cut o',
    '<tool_call>{"name": "weather", "arguments": {"city": ]}} broken <tool_call>{"name": "unknown"}',
]


def parsed(text: str, cuts: Iterable[int], plan: ParsePlan) -> list[Delta]:
    """What a stream makes of a text that comes in pieces."""
    ids = iter("abcdefgh")
    found = ParseResult(frozenset({"weather"}), lambda: f"call_{next(ids)}")
    parser = AnswerParser(plan, found)
    deltas: list[Delta] = []

    def take() -> None:
        content, reasoning, calls = found.drain()
        if content or reasoning or calls:
            deltas.append(Delta(content, (), False, reasoning, calls))

    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        parser.push(text[start:end])
        take()
    parser.finish()
    take()
    return deltas
