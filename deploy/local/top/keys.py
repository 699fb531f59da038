"""Keys: bytes from a terminal → names of keys → what the view shows. Pure.

    bytes ──KeyReader──▶ "s", "up", "escape", …  ──press──▶ Controls

An escape sequence may be split over several reads. ESC by itself is a key too; only a pause tells it from the beginning
of a sequence, so the shell calls `flush` after one.
"""

from __future__ import annotations

import codecs

from msgspec import Struct
from msgspec.structs import replace

ORDERS = ("worker", "load", "running", "waiting", "tokens/s", "state")
"""What the workers can be sorted by; `worker` is the order of their ids."""
FILTER_LIMIT = 64
"""Characters of a filter."""
SEQUENCE_LIMIT = 16
"""Characters of an escape sequence; what is longer is no key, and its rest is skipped."""

_SEQUENCES = {
    **{"[A": "up", "OA": "up", "[B": "down", "OB": "down", "[5~": "page up", "[6~": "page down"},
    **{"[H": "home", "OH": "home", "[1~": "home", "[7~": "home", "[F": "end", "OF": "end", "[4~": "end", "[8~": "end"},
}
"""What follows ESC → the key, as xterm, the Linux console, tmux and screen send it."""
_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x03": "interrupt"}


class KeyReader:
    """Turns bytes into keys: a printable character is its own name, others have one of several letters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._sequence = ""  # what has come of one, with its ESC

    @property
    def pending(self) -> bool:
        """Whether a sequence, or ESC by itself, has begun."""
        return bool(self._sequence)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that these bytes complete. Bytes that are no key are skipped."""
        return [key for character in self._decoder.decode(data) for key in self._take(character)]

    def flush(self) -> list[str]:
        """Return the key that has come if nothing more follows: ESC by itself. A half sequence is dropped."""
        keys = ["escape"] if self._sequence == "\x1b" else []
        self._sequence = ""
        return keys

    def _take(self, character: str) -> list[str]:
        if character == "\x1b":  # a second ESC begins again
            keys, self._sequence = self.flush(), character
            return keys
        if not self._sequence:
            named = _CONTROLS.get(character, character if character.isprintable() else "")
            return [named] if named else []
        if self._sequence == "\x1b" and character not in "[O":  # ESC, and a key of its own
            return [*self.flush(), *self._take(character)]
        if len(self._sequence) < SEQUENCE_LIMIT:
            self._sequence += character
        complete = len(self._sequence) > 2 and "@" <= character <= "~"
        if not complete:
            return []
        named = _SEQUENCES.get(self._sequence[1:], "") if len(self._sequence) < SEQUENCE_LIMIT else ""
        self._sequence = ""
        return [named] if named else []


class Controls(Struct, frozen=True):
    """What was chosen with keys."""

    order: int = 0
    """The index in ORDERS."""
    reversed: bool = False
    """Whether the order is turned round: by default numbers fall and texts rise."""
    filter: str = ""
    typing: bool = False
    """Whether keys go into the filter."""
    offset: int = 0
    help: bool = False
    ended: bool = False


def press(controls: Controls, key: str, page: int, last: int) -> Controls:
    """Return the controls after a key. `page` is the number of workers that are shown, `last` the largest offset."""
    if key == "interrupt":
        return replace(controls, ended=True)
    offset = {
        "up": controls.offset - 1,
        "down": controls.offset + 1,
        "page up": controls.offset - page,
        "page down": controls.offset + page,
        "home": 0,
        "end": last,
    }.get(key)
    if offset is not None:
        return replace(controls, offset=max(0, min(offset, last)))
    return _typed(controls, key) if controls.typing else _pressed(controls, key)


def _typed(controls: Controls, key: str) -> Controls:
    """Return the controls after a key that goes into the filter."""
    if key == "enter":
        return replace(controls, typing=False)
    if key == "escape":
        return replace(controls, typing=False, filter="", offset=0)
    if key == "backspace":
        return replace(controls, filter=controls.filter[:-1], offset=0)
    if len(key) > 1 or len(controls.filter) >= FILTER_LIMIT:
        return controls
    return replace(controls, filter=controls.filter + key, offset=0)


def _pressed(controls: Controls, key: str) -> Controls:
    if key == "q":
        return replace(controls, ended=True)
    if key == "s":
        return replace(controls, order=(controls.order + 1) % len(ORDERS), reversed=False, offset=0)
    if key == "r":
        return replace(controls, reversed=not controls.reversed, offset=0)
    if key == "/":
        return replace(controls, typing=True, help=False)
    if key in ("?", "h"):
        return replace(controls, help=not controls.help)
    if key == "escape":
        return replace(controls, help=False, filter="" if not controls.help else controls.filter, offset=0)
    return controls
