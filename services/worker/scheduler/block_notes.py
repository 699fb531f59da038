"""BlockNotes: what happened lately to the blocks of an engine, for `headrace explain block`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.hashing import ContentKey
from shared.messages.control import Note
from shared.notes import NoteLog

BLOCK_NOTES = 8192
"""Most notes of one engine: 2 MB, and at 8,192 tokens a second in blocks of 16 some seconds of prefilling."""
EVERY_BLOCK = b""
"""Stands for the key in a note about all blocks."""


class BlockNotes:
    """The notes, and the time that new ones get."""

    def __init__(self) -> None:
        self._log: NoteLog[ContentKey] = NoteLog(BLOCK_NOTES)
        self.now_s = 0.0
        """When the step under way began, on the engine's clock."""

    def add(self, key: ContentKey, text: str, name: str = "") -> None:
        """Note what happens to a block now. `name` takes the place of `{}` in the text."""
        self._log.add(key, text, self.now_s, name=name)

    def add_all(self, keys: Sequence[ContentKey], text: str, name: str = "") -> None:
        """Note the same of several blocks."""
        self._log.add_all(keys, text, self.now_s, name=name)

    def find(self, key_end: bytes, now_s: float) -> list[Note]:
        """Return the notes about a block, by the end of its key, oldest first."""
        return self._log.find(lambda key: key.endswith(key_end) or key == EVERY_BLOCK, now_s)
