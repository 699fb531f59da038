"""A text that comes in pieces, read as if it were whole. Pure.

A grammar is a generator over a Source. It yields where it needs a character that is not here yet, and is resumed when
there is more, or when there is none to come. So a format reads as its grammar, and where its text was cut into pieces
cannot matter: what is decided here depends on the characters alone.

    dropped | held since the mark | not read yet | not here yet
            mark                  at

A mark is set where a call may begin, and then behind what was passed on of it, so that the rest can be passed on as the
text that it is when the call goes wrong. Nothing is read twice: a text full of calls that go wrong costs no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields to wait for more of the text; returns what it read."""

MARKED_LIMIT_CHARACTERS = 64 << 10
"""As far behind a mark as may be read: a call must show by then that it is one."""
RUN_LIMIT_CHARACTERS = 4096
"""Read at once, at most."""
_WHITE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text is not what its format says. `str()` of it is the reason, one of few words."""


class TextReader:
    """Grows by `feed` until it is ended."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False

    def feed(self, text: str) -> None:
        """More text; what was read is dropped, as far as it lies before the mark."""
        assert not self._ended
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """There is no more."""
        self._ended = True

    @property
    def unconsumed(self) -> str:
        """What is here and was not passed on: it may be more than text, or is read only when more has come."""
        return self._text[self._at if self._mark is None else self._mark :]

    # --- the mark

    def mark(self) -> None:
        """Keep what is read from here on."""
        self._mark = self._at

    def release(self) -> None:
        """What is read from here on need not be kept."""
        self._mark = None

    def take_marked(self) -> str:
        """What was read since the mark, which is released."""
        assert self._mark is not None
        start, self._mark = self._mark, None
        return self._text[start : self._at]

    # --- what grammars read

    def peek(self) -> Reading[str]:
        """The next character, not read; "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def read(self, characters: int = 1) -> str:
        """What a peek has seen."""
        start = self._at
        self._advance(min(start + characters, len(self._text)))
        return self._text[start : self._at]

    def read_run(self, run: re.Pattern[str], most_characters: int = RUN_LIMIT_CHARACTERS) -> str:
        """As much of a run as is here; perhaps nothing, and perhaps not all of it."""
        found = run.match(self._text, self._at, min(len(self._text), self._at + most_characters))
        if found is None:
            return ""
        self._advance(found.end())
        return found[0]

    def read_word(self, run: re.Pattern[str], limit_characters: int) -> Reading[str]:
        """A whole run, perhaps empty. Raises Malformed where it is longer than the limit."""
        word = ""
        while (yield from self.peek()) and (piece := self.read_run(run, limit_characters + 1 - len(word))):
            word += piece
        if len(word) > limit_characters:
            raise Malformed("malformed")
        return word

    def read_white(self, out: Callable[[str], None] | None = None) -> Reading[None]:
        """White space, perhaps none; to `out`, or to nobody."""
        while (yield from self.peek()) and (piece := self.read_run(_WHITE)):
            if out is not None:
                out(piece)

    @property
    def at_end(self) -> bool:
        """Whether the end was read up to."""
        return self._ended and self._at == len(self._text)

    def optional(self, literal: str) -> Reading[bool]:
        """Whether the text goes on with `literal`, which is read then."""
        while True:
            here = self._text[self._at : self._at + len(literal)]
            if here == literal:
                self._advance(self._at + len(literal))
                return True
            if self._ended or not literal.startswith(here):
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Raises Malformed where the text does not go on with it."""
        if not (yield from self.optional(literal)):
            raise Malformed("malformed")

    def read_until(self, literal: str, out: Callable[[str], None]) -> Reading[bool]:
        """Passes text on up to `literal`, which is not read; False: it did not come, and all is passed on."""
        while True:
            found = self._text.find(literal, self._at)
            end = found if found >= 0 else len(self._text) - (0 if self._ended else self._partial_match(literal))
            if end > self._at:
                out(self._text[self._at : end])
                self._at = end
            if found >= 0 or self._ended:
                return found >= 0
            yield

    def read_rest(self, out: Callable[[str], None]) -> Reading[None]:
        """Passes everything on."""
        while True:
            if self._at < len(self._text):
                out(self._text[self._at :])
                self._at = len(self._text)
            if self._ended:
                return
            yield

    def _partial_match(self, literal: str) -> int:
        """How many of the last characters could be `literal`'s first ones."""
        most = min(len(literal) - 1, len(self._text) - self._at)
        return next((size for size in range(most, 0, -1) if self._text.endswith(literal[:size])), 0)

    def _advance(self, at: int) -> None:
        self._at = at
        if self._mark is not None and at - self._mark > MARKED_LIMIT_CHARACTERS:
            self._at = self._mark + MARKED_LIMIT_CHARACTERS  # wherever the text was cut
            raise Malformed("too_long")

    def validate(self) -> None:
        """Asserts the invariants."""
        assert 0 <= self._at <= len(self._text)
        assert self._mark is None or 0 <= self._mark <= self._at
        assert self._mark is None or self._at - self._mark <= MARKED_LIMIT_CHARACTERS
