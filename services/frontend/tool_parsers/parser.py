"""One answer's text, taken apart as it grows: thinking, then content and calls. Pure."""

from __future__ import annotations

from msgspec import Struct

from services.frontend.tool_parsers import thinking
from services.frontend.tool_parsers.formats import FORMATS, FormatName
from services.frontend.tool_parsers.parse_result import Enough, Found
from services.frontend.tool_parsers.reader import Reading, Source


class Plan(Struct, frozen=True):
    """What may be in an answer beside content."""

    calls: FormatName | None = None
    """None: none."""
    thinks: bool = False
    begun: bool = False
    """Whether the prompt ends within thinking."""


class Parser:
    """Grows by `push` until it is finished, or has enough; `found` is to be emptied after each."""

    def __init__(self, plan: Plan, found: Found) -> None:
        self.found = found
        self.enough = False
        """The answer ends here."""
        self._source = found.source
        self._marks = (*(FORMATS[plan.calls].marks if plan.calls else ()), *(thinking.MARKS if plan.thinks else ()))
        self._reading = _answer(plan, found.source, found)
        self._go_on()

    def push(self, text: str) -> None:
        """More text."""
        assert not self.enough
        self._source.feed(text)
        self._go_on()

    def finish(self, *, short: bool = False) -> None:
        """There is no more. `short`: it was cut, so a mark or a call that has only begun is left out."""
        assert not self.enough
        if short and self._begun(self._source.kept_back):
            self.found.mute()
        self._source.end()
        self._go_on()
        self.found.finish()

    def _begun(self, kept_back: str) -> bool:
        """Whether that is a piece of what is no text. A single character may be a user's, before any call."""
        if self.found.calls:
            return True
        return len(kept_back) > 1 and any(
            mark.startswith(kept_back) or kept_back.startswith(mark) for mark in self._marks
        )

    def _go_on(self) -> None:
        try:
            next(self._reading, None)
        except Enough:
            self.enough = True

    def validate(self) -> None:
        """Asserts the invariants."""
        self._source.validate()
        self.found.validate()


def _answer(plan: Plan, source: Source, found: Found) -> Reading[None]:
    if plan.thinks:
        yield from thinking.thinking(source, found, inside=plan.begun)
    if plan.calls is not None:
        yield from FORMATS[plan.calls].grammar(source, found)
    else:
        yield from source.rest(found.text)
