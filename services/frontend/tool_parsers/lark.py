"""Building blocks of the grammars that constrain answers, in llguidance's dialect of Lark. Pure.

A mark (<tool_call>, [TOOL_CALLS], </think>) that is a token of the model is named by its id. To llguidance no text can
contain such a token, and a mark spelled out in letters is not what the model has learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

Tokens = Mapping[str, int]
"""Marks that are tokens of the model → their ids."""
AnswerKind = Literal["one", "some", "any", "or"]
"""What an answer must be: `one` call; `some` calls, at least one; `any` text with any calls; calls `or` the grammar
named `content`."""
CALLS_LIMIT = 16
"""Calls of an answer that consists of calls, at most. Without a bound, a weak model repeats its call up to the limit of
tokens."""
PLACE_LIMIT_CHARACTERS = 100
"""Characters of a place in a schema that an error repeats at most."""
WHITE = "[ \\t\\r\\n]*"
ANNOTATIONS = frozenset({"$schema", "title", "description", "default", "examples", "deprecated"})
DEFINITIONS = ("$defs", "definitions")
OBJECT_WORDS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS, *ANNOTATIONS}
"""Keywords that the schema of arguments may have if each argument is written by itself."""
OPTIONS = {"whitespace_pattern": "[ ]?"}
"""White space between JSON tokens. If more were allowed, a weak model could fill its whole answer with it."""


class CallableTool(Struct, frozen=True):
    """A tool and the constraint on its calls."""

    name: str
    arguments: dict[str, Any] | None
    """A JSON Schema of an object. None if any object is allowed."""


class UnsupportedSchema(Exception):
    """The schema of a tool cannot be expressed in the format of its calls."""

    def __init__(self, tool: str, place: str, why: str) -> None:
        """`place` is the place in the schema of the arguments; it is cut to PLACE_LIMIT_CHARACTERS."""
        super().__init__(why)
        self.tool, self.place = tool, place[:PLACE_LIMIT_CHARACTERS]


def quote(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression for JSON that follows a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS})}"


def mark_symbol(written: str, tokens: Tokens) -> str:
    """Return a mark as a token, or as a literal if it is none."""
    return f"<[{tokens[written]}]>" if written in tokens else quote(written)


def text_pattern(*without: str, not_first: str = "") -> str:
    """Return the definition of a terminal: any text without the marks `without` that does not begin with a match of the
    regular expression `not_first`."""
    excluded = [f"(?s:.*){_literal(one)}(?s:.*)" for one in without]
    excluded += [f"{not_first}(?s:.*)"] if not_first else []
    return " & ~".join(f"/{one}/" for one in ("(?s:.*)", *excluded))


def upto(written: str, tokens: Tokens, *others: str, not_first: str = "") -> list[str]:
    """Return two rules: TEXT is text without the mark, and `upto` is text that ends with the mark. Neither has any of
    `others`."""
    rules = [f"TEXT: {text_pattern(written, *others, not_first=not_first)}"]
    if written in tokens:
        return [*rules, f"upto: TEXT {mark_symbol(written, tokens)}"]
    unlike = "".join(f" & ~/(?s:.*){_literal(one)}(?s:.*)/" for one in others)
    unlike += f" & ~/{not_first}(?s:.*)/" if not_first else ""
    return [*rules, f"UPTO: /(?s:.*){_literal(written)}/{unlike}", "upto[lazy]: UPTO"]


def json_calls(calls: Sequence[CallableTool], key: str) -> list[str]:
    """Return rules in which `call` is a call as a JSON object, with its name first and its arguments under `key`."""
    return [either("call", len(calls)), *(json_call(at, call, key) for at, call in enumerate(calls))]


def json_call(at: int, call: CallableTool, key: str) -> str:
    """Return the rule of the call with this number as a JSON object."""
    opening = quote(f'{{"name": {json.dumps(call.name)}, "{key}": ')
    return f'call_{at}: {opening} {json_value(call.arguments or {"type": "object"})} "}}"'


def further(call: str, how: AnswerKind) -> str:
    """Return the expression for the calls after the first. `call` is one of them, with what separates it from the
    former one."""
    return {"one": "", "any": f"({call})*"}.get(how, f"({call}){{0,{CALLS_LIMIT - 1}}}")


def either(rule: str, count: int) -> str:
    """Return a rule that matches any one of `count` numbered rules."""
    return f"{rule}: " + " | ".join(f"{rule}_{at}" for at in range(count))


def _literal(written: str) -> str:
    """Escape a text for use in a regular expression."""
    return re.escape(written).replace("/", "\\/")
