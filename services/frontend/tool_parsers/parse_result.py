"""Collects what has been parsed of a model's text so far: reasoning, content and calls. Pure.

The states of a call, as its parser drives them:

    attempt_call ── begin_call(name) ──▶ add_arguments … ── end_call ──▶ complete
       │                                    └── Malformed ──▶ broken or unfinished: the rest is content
       └── Malformed ──▶ its text is content; nothing was sent as a call

If the answer is sent whole, a call is passed on when it is complete, or cut off with the answer. So nothing of a broken
one was sent, and all of its text is content.

White space before the first content is held back, and dropped if a call comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.tool_parsers import json_text
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader, drop

NAME = re.compile(r"[0-9A-Za-z_.-]+")
NAME_LIMIT_CHARACTERS = 64 + len("functions.")
WHITE_LIMIT_CHARACTERS = 64
"""Characters of white space held back at most; longer white space is content."""


class CallPiece(Struct, frozen=True):
    """The next piece of a call."""

    index: int
    """The number of the call in the answer, from 0."""
    arguments: str
    """The next characters of the arguments, which are a JSON object."""
    id: str = ""
    name: str = ""
    """The tool's name. Only the first piece of a call has id and name."""
    content_before: int = 0
    """Characters of content before the call; only in its first piece."""
    custom: bool = False
    """Whether the tool takes a text, which `arguments` then are instead of JSON."""


class CallInput:
    """The input of one call of a custom tool. Arguments are fed to it as they come, and it returns the text so far.

    {"input": "*** Begin Patch\\n…"}  ─▶ *** Begin Patch⏎…    character by character, in whatever pieces it comes
    """

    def __init__(self) -> None:
        self._reader = TextReader()
        self._new: list[str] = []
        self._half = ""
        """The first half of a surrogate pair, whose second half has not come."""
        self._reading = self._read()

    def push(self, arguments: str) -> str:
        """Add characters of the arguments; return what they add to the input."""
        self._reader.feed(arguments)
        next(self._reading, None)
        text = "".join(self._new)
        self._new.clear()
        return text

    def _read(self) -> Reading[None]:
        reader = self._reader
        try:
            yield from reader.expect("{")
            yield from reader.read_white()
            while (yield from reader.peek()) == '"':
                key = yield from json_text.short_text(reader)
                yield from reader.expect_spaced(":")
                is_input = key == "input" and (yield from reader.peek()) == '"'
                yield from json_text.value(reader, self._add if is_input else drop)
                yield from reader.optional_spaced(",")
        except Malformed:  # arguments that broke off; the call ends there
            return

    def _add(self, written: str) -> None:
        """Add a piece of a text in JSON: a quote, an escape, or characters."""
        if written == '"':
            return
        text = self._half + json.loads(f'"{written}"')
        self._half = text[-1] if "\ud800" <= text[-1] <= "\udbff" else ""
        text = text.removesuffix(self._half)
        self._new.append(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class CallLimitReached(Exception):
    """The answer has as many calls as it may have."""


class ParseResult:
    """The parsed text; a parser adds to it, and `drain` empties it."""

    def __init__(
        self,
        names: frozenset[str] = frozenset(),
        draw_id: Callable[[], str] = str,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        parallel: bool = True,
        whole: bool = False,
        customs: frozenset[str] = frozenset(),
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """`names` are the tools of the request, `customs` those of them that take a text, `schemas` the JSON Schemas of
        their arguments by name. `count` is called with the
        outcome of each attempt to parse a call: complete, unfinished (the text ended), broken; or, if it is text,
        malformed, unknown_tool, too_long. Without `parallel`, the end of the first call raises CallLimitReached.
        `whole`: the answer is sent when it is complete."""
        self.reader = TextReader()
        """The text that parsers read."""
        self.calls_begun = 0
        """Number of calls that have begun."""
        self.content_characters = self.reasoning_characters = 0
        """Characters found so far of content and of reasoning."""
        self._names = names
        self._customs = customs
        self._schemas = schemas
        self._input: CallInput | None = None
        """The input of the current call, if its tool takes a text."""
        self._draw_id = draw_id
        self._count = count
        self.parallel = parallel
        """Whether the answer may have several calls."""
        self._whole = whole
        self._open = False
        """Whether a call has begun and not ended."""
        self._held: list[CallPiece] = []
        """The pieces of the open call, if the answer is sent whole."""
        self._held_text: list[str] = []
        """The text that these pieces were read from, and the white space before it."""
        self._white = ""
        self._discarding = False
        """Whether further content and reasoning are dropped."""
        self._no_content = True
        """Whether there was no content so far."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._pieces: list[CallPiece] = []

    # --- called by parsers

    def add_text(self, text: str) -> None:
        """Add content to the answer."""
        if self._discarding:
            return
        if self._no_content and text:
            text = self._white + text
            self._no_content = text.isspace() and len(text) <= WHITE_LIMIT_CHARACTERS
            self._white = text if self._no_content else ""
            if self._no_content:
                return
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        self._content.append(text)
        self.content_characters += len(text)

    def add_reasoning(self, text: str) -> None:
        """Add reasoning to the answer."""
        if self._discarding:
            return
        self._reasoning.append(text)
        self.reasoning_characters += len(text)

    def attempt_call(self, call: Callable[[TextReader, ParseResult], Reading[None]]) -> Reading[bool]:
        """Read one call and return True; or, if it is none, add what was read of it as content and return False."""
        reader = self.reader
        reader.mark()
        try:
            yield from call(reader, self)
        except Malformed as why:
            unfinished = reader.at_end and str(why) == "malformed"
            self._count("unfinished" if unfinished else "broken" if self._open else str(why))
            if not (unfinished and reader.is_short):
                self._withdraw_call()
            self._close_call()
            self.add_text("".join((*self._held_text, reader.take_marked())))
            self._held_text.clear()
            return False
        return True

    def read_tool_name(self) -> Reading[str]:
        """Read the name of a tool that there is. Raise Malformed."""
        return self.tool_name((yield from self.reader.read_word(NAME, NAME_LIMIT_CHARACTERS)))

    def tool_name(self, written: str) -> str:
        """Return the name of the tool that a model calls so, perhaps with `functions.` before it. Raise Malformed if
        there is none."""
        name = written.strip()
        for one in (name, name.removeprefix("functions.")):
            if one in self._names:
                return one
        raise Malformed("unknown_tool")

    def is_tool(self, written: str) -> bool:
        """Return whether there is a tool that a model calls so."""
        try:
            return bool(self.tool_name(written))
        except Malformed:
            return False

    def takes_text(self, name: str) -> bool:
        """Return whether a tool takes a text instead of an object."""
        return name in self._customs

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """Return the JSON Schema of a tool's arguments; empty if it has none."""
        return self._schemas.get(name, {})

    def begin_call(self, name: str) -> None:
        """Begin a call of a tool whose name has been checked; its arguments follow."""
        if self._whole:
            self._held_text.append(self._white)
        self._white, self._open = "", True
        custom = self.takes_text(name)
        self._input = CallInput() if custom else None
        self._add_piece(CallPiece(self.calls_begun, "", self._draw_id(), name, self.content_characters, custom))
        self.calls_begun += 1

    def add_arguments(self, text: str) -> None:
        """Add characters to the arguments of the current call."""
        if self._input is not None:
            text = self._input.push(text)
        self._add_piece(CallPiece(self.calls_begun - 1, text, custom=self._input is not None))

    def _add_piece(self, piece: CallPiece) -> None:
        if piece.name or piece.arguments:
            (self._held if self._whole else self._pieces).append(piece)
        if self._whole:
            self._held_text.append(self.reader.take_marked())
        self.reader.mark()

    def _withdraw_call(self) -> None:
        """Take back the open call, if the answer is sent whole."""
        if self._held:
            self._held.clear()
            self.calls_begun -= 1

    def _close_call(self) -> None:
        if self._held:
            self._held_text.clear()
        self._pieces += self._held
        self._held.clear()
        self._open = False

    def end_call(self) -> None:
        """End the current call, whose arguments are complete. Raise CallLimitReached if no other may follow."""
        self.reader.release()
        self._close_call()
        self._count("complete")
        if not self.parallel:
            raise CallLimitReached

    # --- called by the output

    def discard_rest(self) -> None:
        """Drop all further content and reasoning, and the white space that is held back."""
        self._discarding, self._white = True, ""

    def finish(self) -> None:
        """End the text: white space that is still held back becomes content."""
        if self._white:
            self._add_content(self._white)
            self._white = ""

    def drain(self) -> tuple[str, str, tuple[CallPiece, ...]]:
        """Remove and return what is new: content, reasoning, pieces of calls."""
        new = "".join(self._content), "".join(self._reasoning), join_pieces(self._pieces)
        self._content.clear()
        self._reasoning.clear()
        self._pieces.clear()
        return new

    def validate(self) -> None:
        """Assert every invariant."""
        assert self._no_content or not self._white
        assert len(self._white) <= WHITE_LIMIT_CHARACTERS
        assert not self._open or self.calls_begun
        assert not self._held or (self._open and self._whole)


def join_pieces(pieces: Sequence[CallPiece]) -> tuple[CallPiece, ...]:
    """Join neighbouring pieces of the same call."""
    if len(pieces) < 2:
        return tuple(pieces)
    calls = [list(same) for _, same in groupby(pieces, lambda piece: piece.index)]
    return tuple(replace(same[0], arguments="".join(piece.arguments for piece in same)) for same in calls)
