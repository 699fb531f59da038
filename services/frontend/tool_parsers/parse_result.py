"""What was found in a model's text so far: thinking, content, calls. Pure.

A call goes through, seen from the grammar that reads it:

    attempt ── begin(name) ──▶ arguments … ── end ──▶ complete
       │                          └── Malformed ──▶ broken, unfinished: what has gone out stays, the rest is content
       └── Malformed ──▶ its text is content: nothing of it has gone out

White space before the first content is kept back, and dropped where a call comes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader

WHITE_LIMIT_CHARACTERS = 64
"""White space kept back at most; what is longer is meant."""


class CallPiece(Struct, frozen=True):
    """What a call grew by."""

    index: int
    """Which call of the answer, from 0."""
    arguments: str
    """The next characters of a JSON object."""
    id: str = ""
    name: str = ""
    """Both in a call's first piece only."""
    content_before: int = 0
    """In the first piece: how many characters of content came before the call."""


class CallLimitReached(Exception):
    """The answer has as many calls as it may."""


class ParseResult:
    """Filled by a grammar, emptied by `take`."""

    def __init__(
        self,
        names: frozenset[str] = frozenset(),
        draw_id: Callable[[], str] = str,
        *,
        count: Callable[[str], None] = lambda _outcome: None,
        parallel: bool = True,
    ) -> None:
        """`names` are the tools that there are; `count` is told how each attempt at a call ended: complete, unfinished
        (the text ended), broken, or as text: malformed, unknown_tool, too_long. Not `parallel`: Enough is raised by
        the end of the first call."""
        self.reader = TextReader()
        """What grammars read."""
        self.calls_begun = 0
        """Calls that have begun."""
        self.content_characters = self.reasoning_characters = 0
        """Found so far."""
        self._names = names
        self._draw_id = draw_id
        self._count = count
        self._parallel = parallel
        self._open = False
        """Whether a call has begun and not ended."""
        self._white = ""
        self._muted = False
        """What else is read is left out."""
        self._bare = True
        """Whether there was no content yet."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._pieces: list[CallPiece] = []

    # --- what grammars say

    def add_text(self, text: str) -> None:
        """Content."""
        if self._muted:
            return
        if self._bare and text:
            text = self._white + text
            self._bare = text.isspace() and len(text) <= WHITE_LIMIT_CHARACTERS
            self._white = text if self._bare else ""
            if self._bare:
                return
        self._add_content(text)

    def _add_content(self, text: str) -> None:
        self._content.append(text)
        self.content_characters += len(text)

    def add_reasoning(self, text: str) -> None:
        """Thinking."""
        if self._muted:
            return
        self._reasoning.append(text)
        self.reasoning_characters += len(text)

    def attempt_call(self, call: Callable[[TextReader, ParseResult], Reading[None]]) -> Reading[bool]:
        """Reads one call; or text, up to where it turned out to be none. Whether it was a call."""
        source = self.reader
        source.mark()
        try:
            yield from call(source, self)
        except Malformed as why:
            unfinished = source.at_end and str(why) == "malformed"
            self._count("unfinished" if unfinished else "broken" if self._open else str(why))
            self._open = False
            self.add_text(source.take_marked())
            return False
        return True

    def check_tool_name(self, name: str) -> None:
        """Raises Malformed where there is no tool of that name."""
        if name not in self._names:
            raise Malformed("unknown_tool")

    def begin_call(self, name: str) -> None:
        """It is a call, of a tool that is `known`; its arguments follow."""
        self._white, self._open = "", True
        self._pieces.append(CallPiece(self.calls_begun, "", self._draw_id(), name, self.content_characters))
        self.calls_begun += 1
        self.reader.mark()

    def add_arguments(self, text: str) -> None:
        """The next characters of its arguments."""
        self.reader.mark()
        self._pieces.append(CallPiece(self.calls_begun - 1, text))

    def end_call(self) -> None:
        """Its arguments are complete. May raise Enough."""
        self.reader.release()
        self._open = False
        self._count("complete")
        if not self._parallel:
            raise CallLimitReached

    # --- what becomes of it

    def discard_rest(self) -> None:
        """What else is read, and white space that is kept back, is no content and no thinking."""
        self._muted, self._white = True, ""

    def finish(self) -> None:
        """The text has ended: white space that is still kept back is content."""
        if self._white:
            self._add_content(self._white)
            self._white = ""

    def drain(self) -> tuple[str, str, tuple[CallPiece, ...]]:
        """What is new: content, reasoning, pieces of calls."""
        new = "".join(self._content), "".join(self._reasoning), join_pieces(self._pieces)
        self._content.clear()
        self._reasoning.clear()
        self._pieces.clear()
        return new

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._bare or not self._white
        assert len(self._white) <= WHITE_LIMIT_CHARACTERS
        assert not self._open or self.calls_begun


def join_pieces(pieces: Sequence[CallPiece]) -> tuple[CallPiece, ...]:
    """Neighbours of one call as one piece."""
    if len(pieces) < 2:
        return tuple(pieces)
    return tuple(_joined(list(same)) for _, same in groupby(pieces, lambda piece: piece.index))


def _joined(pieces: Sequence[CallPiece]) -> CallPiece:
    return replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))
