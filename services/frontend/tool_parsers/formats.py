"""The formats of tool calls, and how a chat template shows which one its model writes. Pure."""

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
    """The format in which one family of models writes tool calls."""

    parse: Callable[[TextReader, ParseResult], Reading[None]]
    """Reads an answer."""
    rules: Callable[[Sequence[lark.CallableTool], lark.Tokens, lark.AnswerKind], list[str]]
    """Returns the Lark rules that an answer must follow. Raises lark.UnsupportedSchema."""
    template_pattern: re.Pattern[str]
    """Matches in the source of a chat template that asks for this format."""
    marks: tuple[str, ...]
    """Texts of the format that may be special tokens of the model; then they are never part of ordinary text."""
    id_prefix: str = "call_"
    id_digits: int = 24
    json_is_never_a_call: bool = False
    """Whether no JSON text can be taken for a call, so that an answer may be constrained to either (`or`)."""


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
    # Mistral's templates raise an error on ids that are not nine letters or digits.
    "mistral": ToolCallFormat(
        mistral.parse, mistral.rules, re.compile(r"\[TOOL_CALLS\]"), mistral.MARKS, id_prefix="", id_digits=9
    ),
    "pythonic": ToolCallFormat(
        pythonic.parse, pythonic.rules, re.compile(r"\[func_name1\(|<function_calls>(?!(?:\\n|\s)*<)"), pythonic.MARKS
    ),
}


def detect_format(template: str) -> FormatName | None:
    """Return the format that a chat template asks for; None if it shows none, or several."""
    shown: list[FormatName] = [name for name, one in FORMATS.items() if one.template_pattern.search(template)]
    return shown[0] if len(shown) == 1 else None


def detect_reasoning(template: str) -> ReasoningName | None:
    """Return the format of reasoning, or None. The chat template of a model that reasons removes reasoning from former
    turns, or opens it."""
    return "think" if reasoning.CLOSE in template or reasoning.OPEN in template else None
