"""What the grammars that engines are held to are made of, in llguidance's dialect of Lark. Pure.

A mark (<tool_call>, [TOOL_CALLS], </think>) that is a token of the model's tokenizer is named by its id: to llguidance
no text can hold it, and one that is spelled out of its letters is not what the model has learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Tokens = Mapping[str, int]
"""Marks that are tokens of their own → their ids."""
AnswerKind = Literal["one", "some", "any", "or"]
"""What an answer is held to: one call; one or several; any text, and any calls in it; calls, or else the grammar that
is named `content`."""
PLACE_LIMIT_CHARACTERS = 100
WHITE = "[ \\t\\r\\n]*"
OPTIONS = {"whitespace_pattern": "[ ]?"}
"""Between JSON's tokens: more would let a weak model go on with white space to its limit."""


class CallableTool(Struct, frozen=True):
    """A tool as its calls are held to it."""

    name: str
    arguments: dict[str, Any] | None
    """A JSON Schema of an object; None: any object will do."""


class UnsupportedSchema(Exception):
    """No call of the tool can be held to in its format."""

    def __init__(self, tool: str, word: str, why: str) -> None:
        """`word`: a place in its arguments' schema, of which no more is told than TOLD_CHARACTERS."""
        super().__init__(why)
        self.tool, self.word = tool, word[:PLACE_LIMIT_CHARACTERS]


def quote(text: str) -> str:
    """As a literal."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that holds to a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS})}"


def mark_symbol(written: str, tokens: Tokens) -> str:
    """As a token, or as a literal."""
    return f"<[{tokens[written]}]>" if written in tokens else quote(written)


def text_pattern(*, without: str = "", not_first: str = "") -> str:
    """A terminal's definition: any text without a mark, that does not begin with what a regular expression says."""
    held_back = [f"(?s:.*){_literal(without)}(?s:.*)"] if without else []
    held_back += [f"{not_first}(?s:.*)"] if not_first else []
    return " & ~".join(f"/{one}/" for one in ("(?s:.*)", *held_back))


def upto(written: str, tokens: Tokens, *, not_first: str = "") -> list[str]:
    """Rules: TEXT without the mark, and `upto` with one, at its end."""
    rules = [f"TEXT: {text_pattern(without=written, not_first=not_first)}"]
    if written in tokens:
        return [*rules, f"upto: TEXT {mark_symbol(written, tokens)}"]
    unlike = f" & ~/{not_first}(?s:.*)/" if not_first else ""
    return [*rules, f"UPTO: /(?s:.*){_literal(written)}/{unlike}", "upto[lazy]: UPTO"]


def json_calls(calls: Sequence[CallableTool], key: str) -> list[str]:
    """Rules: `call` is any of the calls, as a JSON object with its name first and its arguments as `key`."""
    rules = [either("call", len(calls))]
    for at, call in enumerate(calls):
        opening = quote(f'{{"name": {json.dumps(call.name)}, "{key}": ')
        rules.append(f'call_{at}: {opening} {json_value(call.arguments or {"type": "object"})} "}}"')
    return rules


def either(rule: str, count: int) -> str:
    """The rule that is any one of so many numbered ones."""
    return f"{rule}: " + " | ".join(f"{rule}_{at}" for at in range(count))


def _literal(written: str) -> str:
    """A text within a regular expression."""
    return re.escape(written).replace("/", "\\/")
