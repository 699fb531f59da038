"""Finds stop strings in a text that comes in pieces. Pure.

    emitted before | held: the longest suffix that could begin a stop string | not here yet

The stop string that is complete first wins; of two that are complete with the same character, the longer one. So it
does not matter how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; nothing is passed on after it."""
        self.found = ""
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Return the part of the text that is now known to lie before any stop string and was not returned yet."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            end, at = min(found)
            self.found = text[at:end]
            return text[:at]
        keep = self._candidate(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return what was held back; the text has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _candidate(self, text: str) -> int:
        """Return where the earliest stop string that is still possible would begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._held) < max(1, self._longest)
        assert not (self.stopped and self._held)
        assert not self._held or any(stop.startswith(self._held) for stop in self._stops)
