"""Takes the input of a custom tool out of the arguments that its call is written with. Pure.

{"input": "*** Begin Patch\\n…"}  ─▶ *** Begin Patch⏎…        character by character, in whatever pieces it comes
"""

from __future__ import annotations

import json

from services.frontend.tool_parsers import json_text
from services.frontend.tool_parsers.reader import Malformed, Reading, TextReader, drop


class CallInput:
    """The input of one call. Arguments are fed to it as they come, and it returns the text so far."""

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
