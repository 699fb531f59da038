"""Texts of models that call tools, with their meaning, and a reader that cuts them into pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from services.frontend.tool_parsers.parse_result import CallPiece, ParseResult, join_pieces
from services.frontend.tool_parsers.parser import AnswerParser, FormatName, ParsePlan

NAMES = frozenset({"weather", "get_time", "run-sql"})


class Answer(Struct):
    """The content, reasoning and calls of a whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    """The name and the arguments of each call."""
    outcomes: list[str] = []


class Transcript(Struct, frozen=True):
    """A model's text and its meaning."""

    format: FormatName
    text: str
    answer: Answer


def read(
    plan: ParsePlan,
    pieces: Iterable[str],
    *,
    parallel: bool = True,
    short: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Answer:
    """Parse pieces of text; check that pieces of calls are as OpenAI's clients expect them."""
    answer, taken = Answer(), list[CallPiece]()
    numbers = iter(range(1000))
    found = ParseResult(
        NAMES, lambda: f"id{next(numbers)}", count=answer.outcomes.append, parallel=parallel, schemas=schemas
    )
    parser = AnswerParser(plan, found)

    def take() -> None:
        parser.validate()
        content, reasoning, calls = found.drain()
        answer.content += content
        answer.reasoning += reasoning
        taken.extend(calls)

    for piece in pieces:
        if not parser.at_call_limit:
            parser.push(piece)
            take()
    if not parser.at_call_limit:
        parser.finish(short=short)
        take()
    begun = [piece for piece in taken if piece.name]
    assert [piece.index for piece in begun] == list(range(found.calls_begun)), (
        "a call's first piece is its only named one"
    )
    assert [piece.id for piece in begun] == [f"id{number}" for number in range(found.calls_begun)]
    assert [piece.index for piece in taken] == sorted(piece.index for piece in taken)
    answer.calls = [(piece.name, piece.arguments) for piece in join_pieces(taken)]
    return answer


def bytewise(content: bytes, *cuts: int) -> Iterator[str]:
    """Return the text of `content`, cut at these bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
        yield decoder.decode(content[start:end])


def every_cut(
    plan: ParsePlan,
    text: str,
    *,
    short: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Answer:
    """Return the meaning of a text; check that it is the same wherever the text is cut in two, and byte by byte."""
    whole = read(plan, [text], short=short, schemas=schemas)
    content = text.encode()
    for cut in range(len(content) + 1):
        assert read(plan, bytewise(content, cut), short=short, schemas=schemas) == whole, f"cut at byte {cut}"
    assert read(plan, bytewise(content, *range(1, len(content))), short=short, schemas=schemas) == whole, "byte by byte"
    return whole


def one(name: str, arguments: str, content: str = "") -> Answer:
    """Return an answer with one complete call."""
    return Answer(content, "", [(name, arguments)], ["complete"])


def text(content: str, *outcomes: str) -> Answer:
    """Return an answer without calls."""
    return Answer(content, "", [], list(outcomes))
