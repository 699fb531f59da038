"""NoteLog: what happened lately to requests or blocks that a user may ask about. Pure.

Only what is worth telling is noted: that a request was refused, lost, or waited; that a block was stored, moved or
evicted. An entry costs an append; it is put into words when a user asks. At the limit the oldest entry is forgotten.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from shared.errors import ProtocolError
from shared.hashing import KEY_BYTES
from shared.messages.control import Note
from shared.request_names import bare_id, is_named

NOTES_IN_ANSWER = 100
"""Most notes in one answer: the latest ones."""
TEXT_CHARS = 400
"""Most characters of a note: reasons come from other processes, and may repeat a client's words."""

REQUEST_NOTES = 4096
"""Most notes about requests in one process."""
_BLOCK = re.compile(f"[0-9a-f]{{{KEY_BYTES}}}|[0-9a-f]{{{2 * KEY_BYTES}}}")

Key = TypeVar("Key", str, bytes)


class NoteLog(Generic[Key]):
    """The latest notes, each about one request or one block. Times are seconds on the caller's clock."""

    def __init__(self, limit: int) -> None:
        self._entries: deque[tuple[Key, int, float, str, str]] = deque(maxlen=limit)
        """What it is about, the attempt, when, the text, and what stands in the text for `{}`."""

    def add(self, about: Key, text: str, at_s: float, *, attempt: int = 0, name: str = "") -> None:
        """Add a note. `name` takes the place of `{}` in the text."""
        self._entries.append((about, attempt, at_s, text, name))

    def add_all(self, about: Iterable[Key], text: str, at_s: float, *, name: str = "") -> None:
        """Add the same note about each of these."""
        self._entries.extend([(one, 0, at_s, text, name) for one in about])

    def find(self, is_meant: Callable[[Key], bool], now_s: float) -> list[Note]:
        """Return the latest notes about what is meant, oldest first."""
        found = [entry for entry in self._entries if is_meant(entry[0])][-NOTES_IN_ANSWER:]
        return [
            Note(
                about if isinstance(about, str) else about.hex(),
                round(max(0.0, now_s - at_s), 6),
                _shown(text.replace("{}", name) if name else text),
                attempt,
            )
            for about, attempt, at_s, text, name in found
        ]

    def __len__(self) -> int:
        """Return the number of notes that are kept."""
        return len(self._entries)


def _shown(text: str) -> str:
    """Return a text without what ends a line or controls a terminal, and not too long."""
    clean = "".join(each if each.isprintable() else " " for each in text)
    return clean if len(clean) <= TEXT_CHARS else clean[: TEXT_CHARS - 1] + "…"


def block_name(text: str) -> bytes:
    """Return the last 8 bytes of a block's key, or all 16, from hex. Raise ProtocolError."""
    if not _BLOCK.fullmatch(text.lower()):
        raise ProtocolError(f"block {text[:64]!r}: the last 16 hex digits of its key are needed, or all 32")
    return bytes.fromhex(text)


class ProcessNotes:
    """What one process notes. A service that stores blocks sets `find_block`."""

    def __init__(self) -> None:
        self.requests: NoteLog[str] = NoteLog(REQUEST_NOTES)
        self.find_block: Callable[[bytes], Awaitable[tuple[list[str], list[Note]]]] | None = None
        """Returns where a block is now, and the notes about it, by the end of its key. Raises Unavailable."""

    def find_request(self, name: str, now_s: float) -> list[Note]:
        """Return the notes about a request, oldest first; an empty name means all requests."""
        name = bare_id(name)
        return self.requests.find(lambda request: is_named(request, name), now_s)
