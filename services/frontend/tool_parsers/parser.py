"""Parses the text of one answer as it grows: reasoning, then content, and calls in the format of its model. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from services.frontend.tool_parsers import hermes, lark, llama3_json, mistral, pythonic, qwen3_coder, reasoning
from services.frontend.tool_parsers.parse_result import CallLimitReached, ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader

FormatName = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
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
    beginning: re.Pattern[str] | None = None
    """How a call begins, up to the tool's name, if a call may end reasoning."""
    json_is_never_a_call: bool = False
    """Whether no JSON text can be taken for a call, so that an answer may be constrained to either (`or`)."""


FORMATS: Mapping[FormatName, ToolCallFormat] = {
    "hermes": ToolCallFormat(
        hermes.parse,
        hermes.rules,
        re.compile(r'<tool_call>[^<]{,40}\{\\?"name'),
        hermes.MARKS,
        beginning=hermes.BEGINNING,
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
    "qwen3_coder": ToolCallFormat(
        qwen3_coder.parse,
        qwen3_coder.rules,
        re.compile(r"<tool_call>(\\n|\s)*<function="),
        qwen3_coder.MARKS,
        beginning=qwen3_coder.BEGINNING,
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


class ParsePlan(Struct, frozen=True):
    """What an answer may have in addition to content."""

    calls: FormatName | None = None
    """The format of calls. None if the answer has no calls."""
    reasoning: bool = False
    reasoning_open: bool = False
    """Whether the prompt ends within reasoning."""
    reasoning_begun: bool = False
    """Whether the prompt has some text of that reasoning already."""
    held: bool = False
    """Whether the answer is held to a grammar. The grammar begins after reasoning, so only its own tag ends that."""


class AnswerParser:
    """Takes text by `push` until it is finished or at its call limit. `result` is to be drained after each."""

    def __init__(self, plan: ParsePlan, result: ParseResult) -> None:
        self.result = result
        self.at_call_limit = False
        """Whether the answer has all the calls that it may have, and so ends here."""
        self._reader = result.reader
        self._marks = (*(FORMATS[plan.calls].marks if plan.calls else ()), *(reasoning.MARKS if plan.reasoning else ()))
        self._reading = _answer(plan, result.reader, result)
        self._go_on()

    def push(self, text: str) -> None:
        """Parse more text."""
        assert not self.at_call_limit
        self._reader.feed(text)
        self._go_on()

    def finish(self, *, short: bool = False) -> None:
        """End the text. `short`: the answer was cut, so a mark or a call that has only begun is dropped."""
        assert not self.at_call_limit
        if short and self._is_partial(self._reader.unconsumed):
            self.result.discard_rest()
        self._reader.end(short=short)
        self._go_on()
        self.result.finish()

    def _is_partial(self, kept_back: str) -> bool:
        """Return whether the end of the text is part of a mark or a call. One character before any call may be text."""
        if self.result.calls_begun:
            return True
        return len(kept_back) > 1 and any(
            mark.startswith(kept_back) or kept_back.startswith(mark) for mark in self._marks
        )

    def _go_on(self) -> None:
        try:
            next(self._reading, None)
        except CallLimitReached:
            self.at_call_limit = True

    def validate(self) -> None:
        """Assert every invariant."""
        self._reader.validate()
        self.result.validate()


def _answer(plan: ParsePlan, reader: TextReader, result: ParseResult) -> Reading[None]:
    if plan.reasoning:
        call = FORMATS[plan.calls].beginning if plan.calls and not plan.held else None
        yield from reasoning.read_reasoning(
            reader, result, inside=plan.reasoning_open, begun=plan.reasoning_begun, call=call
        )
    if plan.calls is not None:
        yield from FORMATS[plan.calls].parse(reader, result)
    else:
        yield from reader.read_rest(result.add_text)
