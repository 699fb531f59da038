"""The formats that calls of tools are written in, and how a chat template shows which one its model writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from services.frontend.tool_parsers import hermes, lark, llama3_json, mistral, pythonic, reasoning
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader

FormatName = Literal["hermes", "llama3_json", "mistral", "pythonic"]
ReasoningName = Literal["think"]


class ToolCallFormat(Struct, frozen=True):
    """How one family of models writes calls."""

    parse: Callable[[TextReader, ParseResult], Reading[None]]
    """What reads an answer."""
    rules: Callable[[Sequence[lark.CallableTool], lark.Tokens, lark.AnswerKind], list[str]]
    """What an answer is held to, as rules of Lark. Raises lark.Unwritable."""
    template_pattern: re.Pattern[str]
    """Found in the source of a chat template that asks for this format."""
    marks: tuple[str, ...]
    """What the grammar reads that may be a special token of the model, and then is part of no text otherwise."""
    id_prefix: str = "call_"
    id_digits: int = 24
    json_is_never_a_call: bool = False
    """No JSON can be read as a call or begins like one: an answer may be held to the one or the other (`or`)."""


FORMATS: Mapping[FormatName, ToolCallFormat] = {
    "hermes": ToolCallFormat(
        hermes.parse,
        hermes.rules,
        re.compile(r'<tool_call>[^<]{,40}\{\\?"name'),
        hermes.MARKS,
        json_is_never_a_call=True,
    ),
    "llama3_json": ToolCallFormat(
        llama3_json.parse,
        llama3_json.rules,
        re.compile(r'\{\\?"name\\?": function name, \\?"parameters'),
        llama3_json.MARKS,
    ),
    # Its templates raise an error on ids that are not nine letters or digits.
    "mistral": ToolCallFormat(
        mistral.parse, mistral.rules, re.compile(r"\[TOOL_CALLS\]"), mistral.MARKS, id_prefix="", id_digits=9
    ),
    "pythonic": ToolCallFormat(pythonic.parse, pythonic.rules, re.compile(r"\[func_name1\("), pythonic.MARKS),
}


def detect_format(template: str) -> FormatName | None:
    """None: it does not show, or shows two."""
    shown: list[FormatName] = [name for name, one in FORMATS.items() if one.template_pattern.search(template)]
    return shown[0] if len(shown) == 1 else None


def detect_reasoning(template: str) -> ReasoningName | None:
    """Whether the model thinks aloud: its template cuts thinking out of former turns, or opens it."""
    return "think" if reasoning.CLOSE in template or reasoning.OPEN in template else None
