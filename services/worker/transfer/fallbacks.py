"""Counts failures of a direction's paths and leaves out a path that keeps failing. Pure.

works ──fails──▶ failing ──MOST_IN_A_ROW──▶ left out, for good
  ▲─────works────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MOST_IN_A_ROW = 3
"""Failures in a row after which a path is left out."""


class Fallbacks:
    """The failures of one direction's paths."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self._in_a_row: Counter[str] = Counter()

    def usable(self, order: Sequence[str]) -> list[str]:
        """Return the paths of `order` that are not left out."""
        return [path for path in order if path not in self.left_out]

    def record_success(self, path: str) -> None:
        if self._in_a_row:
            self._in_a_row.pop(path, None)

    def record_failure(self, path: str) -> bool:
        """Count a failure; return whether the path is left out now."""
        self._in_a_row[path] += 1
        if self._in_a_row[path] == MOST_IN_A_ROW:
            self.left_out.add(path)
        return path in self.left_out

    def validate(self) -> None:
        """Raise AssertionError if the counts contradict themselves."""
        assert self.left_out == {path for path, count in self._in_a_row.items() if count >= MOST_IN_A_ROW}
        assert all(self._in_a_row.values())
