"""Finds stop strings in a text that comes in pieces. Pure.

    emitted before | held: the longest suffix that could begin a stop string | not here yet

The stop string that is complete first wins; of two that are complete with the same character, the longer one. So it
does not matter how the text was cut into pieces. One that is complete while stopping is not allowed yet is text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on up to the first stop string, and with `include` that string too."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self._stops = tuple(stops)
        self._include = include
        self._longest_first = sorted(stops, key=len, reverse=True)
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; nothing is passed on after it."""
        self.found = ""
        """The stop string that was found."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return the part of the text that is now known to lie before any stop string and was not returned yet. Without
        `may_stop`, a stop string that this text completes does not count."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        before, text = len(self._held), self._held + text
        found: list[tuple[int, int]] = []
        if may_stop:
            starts = [(stop, max(0, before - len(stop) + 1)) for stop in self._stops]  # so that the end is new
            found = [(at + len(stop), at) for stop, start in starts if (at := text.find(stop, start)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            end, at = min(found)
            self.found = text[at:end]
            return text[:end] if self._include else text[:at]
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
            begun = text[at:]
            if text[at] in self._first and self._begins(begun):
                return at
        return len(text)

    def _begins(self, begun: str) -> bool:
        """Return whether a longer stop string begins with a text. Shorter ones are not looked at, so that `_candidate`
        compares as many as there are characters in all stop strings."""
        for stop in self._longest_first:
            if len(stop) <= len(begun):
                return False
            if stop.startswith(begun):
                return True
        return False

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._held) < max(1, self._longest)
        assert not (self.stopped and self._held)
        assert not self._held or any(stop.startswith(self._held) for stop in self._stops)
