"""Reads a text that comes in pieces as if it were whole. Pure.

A parser is a generator over a TextReader. It yields when it needs a character that has not come yet, and is resumed
when more text has come or the text has ended. So a parser reads like its grammar, and its result depends on the
characters alone, not on where the text was cut into pieces.

    dropped | kept since the mark | not read yet | not come yet
            mark                  at

A mark is set where a call may begin, and then after each part of it that was passed on. If the call turns out to be
malformed, what was read since the mark is passed on as text. Nothing is read twice, so malformed calls cost no more.

Arguments are passed on as they are written. So a call that turns out broken later cannot be taken back: it ends, and
the rest is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that yields to wait for more text and returns what it read."""

MARKED_LIMIT_CHARACTERS = 64 << 10
"""Characters that may be read after a mark; by then a call must have begun."""
RUN_LIMIT_CHARACTERS = 4096
"""Characters read at once at most."""
_WHITE = re.compile(r"[ \t\r\n]*")


def drop(_text: str) -> None:
    """Take text and do nothing with it."""


class Malformed(Exception):
    """The text does not follow its format. The message is the reason: malformed, unknown_tool or too_long."""


class TextReader:
    """The text so far, with a position and a mark; `feed` adds to it until `end`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self.is_short = False
        """Whether the text was cut, so that more would have followed."""

    def feed(self, text: str) -> None:
        """Add text; text that was read before the mark is dropped."""
        assert not self._ended
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def end(self, *, short: bool = False) -> None:
        """End the text. `short`: it was cut."""
        self._ended, self.is_short = True, short

    @property
    def unconsumed(self) -> str:
        """The text that was not passed on: it may be part of a call or a mark, or waits for more."""
        return self._text[self._at if self._mark is None else self._mark :]

    # --- the mark

    def mark(self) -> None:
        """Set the mark: keep what is read from here on."""
        self._mark = self._at

    def release(self) -> None:
        """Remove the mark: what is read need not be kept."""
        self._mark = None

    def take_marked(self) -> str:
        """Remove the mark; return what was read since."""
        assert self._mark is not None
        start, self._mark = self._mark, None
        return self._text[start : self._at]

    # --- called by parsers

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, characters: int = 1) -> str:
        """Read characters that have come, as `peek` has shown."""
        start = self._at
        self._advance(min(start + characters, len(self._text)))
        return self._text[start : self._at]

    def read_run(self, run: re.Pattern[str], most_characters: int = RUN_LIMIT_CHARACTERS) -> str:
        """Read what has come of a run of characters; perhaps nothing, perhaps not all of it."""
        found = run.match(self._text, self._at, min(len(self._text), self._at + most_characters))
        if found is None:
            return ""
        self._advance(found.end())
        return found[0]

    def read_word(self, run: re.Pattern[str], limit_characters: int) -> Reading[str]:
        """Read a whole run of characters, perhaps empty. Raise Malformed if it is longer than the limit."""
        word = ""
        while (yield from self.peek()) and (piece := self.read_run(run, limit_characters + 1 - len(word))):
            word += piece
        if len(word) > limit_characters:
            raise Malformed("malformed")
        return word

    def read_white(self, out: Callable[[str], None] = drop) -> Reading[None]:
        """Read white space, perhaps none; pass it to `out`."""
        while (yield from self.peek()) and (piece := self.read_run(_WHITE)):
            out(piece)

    @property
    def at_end(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self._ended and self._at == len(self._text)

    def goes_on_with(self, literal: str) -> Reading[bool]:
        """Return whether the text goes on with `literal`, which is not read."""
        while True:
            here = self._text[self._at : self._at + len(literal)]
            if here == literal or self._ended or not literal.startswith(here):
                return here == literal
            yield

    def optional(self, literal: str) -> Reading[bool]:
        """Read `literal` if the text goes on with it; return whether it does."""
        found = yield from self.goes_on_with(literal)
        if found:
            self._advance(self._at + len(literal))
        return found

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`. Raise Malformed if the text does not go on with it."""
        if not (yield from self.optional(literal)):
            raise Malformed("malformed")

    def optional_spaced(self, literal: str) -> Reading[bool]:
        """Read `literal` and the white space around it if the text goes on with it; return whether it does."""
        yield from self.read_white()
        found = yield from self.optional(literal)
        yield from self.read_white()
        return found

    def expect_spaced(self, literal: str, out: Callable[[str], None] = drop) -> Reading[None]:
        """Read `literal` and the white space around it; pass all of it to `out`. Raise Malformed without it."""
        yield from self.read_white(out)
        yield from self.expect(literal)
        out(literal)
        yield from self.read_white(out)

    def look(self, pattern: re.Pattern[str], most_characters: int) -> Reading[re.Match[str] | None]:
        """Match what comes next, `most_characters` at most, without reading it."""
        while True:
            here = self._text[self._at : self._at + most_characters]
            found = pattern.match(here)
            if found is not None or self._ended or len(here) == most_characters:
                return found
            yield

    def read_until(self, literal: str, out: Callable[[str], None], *others: str) -> Reading[bool]:
        """Pass text on up to `literal`, or one of `others`, which is not read, and return True. False if none came, and
        all was passed on."""
        literals = (literal, *others)
        while True:
            # Of a long text, a part at a time: a literal that it does not have is not searched in all of it repeatedly.
            until = min(len(self._text), self._at + RUN_LIMIT_CHARACTERS)
            is_last = until == len(self._text)
            places = [self._text.find(one, self._at, until) for one in literals]
            found = min((at for at in places if at >= 0), default=-1)
            held = 0
            if found < 0:
                over = max(map(len, literals)) - 1
                held = over if not is_last else 0 if self._ended else max(map(self._partial_match, literals))
            end = found if found >= 0 else until - held
            if end > self._at:
                start, self._at = self._at, end
                out(self._text[start:end])  # it may set the mark, here
            if found >= 0 or (is_last and self._ended):
                return found >= 0
            if is_last:
                yield

    def read_rest(self, out: Callable[[str], None]) -> Reading[None]:
        """Pass on all the text that follows."""
        while True:
            if self._at < len(self._text):
                out(self._text[self._at :])
                self._at = len(self._text)
            if self._ended:
                return
            yield

    def _partial_match(self, literal: str) -> int:
        """Return how many characters at the end could begin `literal`."""
        start = self._text.find(literal[0], max(self._at, len(self._text) - len(literal) + 1))
        while start >= 0 and not literal.startswith(self._text[start:]):
            start = self._text.find(literal[0], start + 1)
        return len(self._text) - start if start >= 0 else 0

    def _advance(self, at: int) -> None:
        self._at = at
        if self._mark is not None and at - self._mark > MARKED_LIMIT_CHARACTERS:
            self._at = self._mark + MARKED_LIMIT_CHARACTERS  # the same wherever the text was cut
            raise Malformed("too_long")

    def validate(self) -> None:
        """Assert every invariant."""
        assert 0 <= self._at <= len(self._text)
        assert self._mark is None or 0 <= self._mark <= self._at
        assert self._mark is None or self._at - self._mark <= MARKED_LIMIT_CHARACTERS
