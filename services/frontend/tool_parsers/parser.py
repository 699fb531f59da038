"""One answer's text, taken apart as it grows: thinking, then content and calls. Pure."""

from __future__ import annotations

from msgspec import Struct

from services.frontend.tool_parsers import reasoning
from services.frontend.tool_parsers.formats import FORMATS, FormatName
from services.frontend.tool_parsers.parse_result import CallLimitReached, ParseResult
from services.frontend.tool_parsers.reader import Reading, TextReader


class ParsePlan(Struct, frozen=True):
    """What may be in an answer beside content."""

    calls: FormatName | None = None
    """None: none."""
    reasoning: bool = False
    reasoning_open: bool = False
    """Whether the prompt ends within thinking."""


class AnswerParser:
    """Grows by `push` until it is finished, or has enough; `found` is to be emptied after each."""

    def __init__(self, plan: ParsePlan, result: ParseResult) -> None:
        self.result = result
        self.at_call_limit = False
        """The answer ends here."""
        self._reader = result.reader
        self._marks = (*(FORMATS[plan.calls].marks if plan.calls else ()), *(reasoning.MARKS if plan.reasoning else ()))
        self._reading = _answer(plan, result.reader, result)
        self._go_on()

    def push(self, text: str) -> None:
        """More text."""
        assert not self.at_call_limit
        self._reader.feed(text)
        self._go_on()

    def finish(self, *, short: bool = False) -> None:
        """There is no more. `short`: it was cut, so a mark or a call that has only begun is left out."""
        assert not self.at_call_limit
        if short and self._is_partial(self._reader.unconsumed):
            self.result.discard_rest()
        self._reader.end()
        self._go_on()
        self.result.finish()

    def _is_partial(self, kept_back: str) -> bool:
        """Whether that is a piece of what is no text. A single character may be a user's, before any call."""
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
        """Asserts the invariants."""
        self._reader.validate()
        self.result.validate()


def _answer(plan: ParsePlan, reader: TextReader, result: ParseResult) -> Reading[None]:
    if plan.reasoning:
        yield from reasoning.read_reasoning(reader, result, inside=plan.reasoning_open)
    if plan.calls is not None:
        yield from FORMATS[plan.calls].parse(reader, result)
    else:
        yield from reader.read_rest(result.add_text)
