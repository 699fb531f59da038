"""Which of a direction's paths fail again and again. Pure.

works ──fails──▶ failing ──MOST_IN_A_ROW──▶ left out, for good
  ▲─────works────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MOST_IN_A_ROW = 3


class Fallbacks:
    """See the module."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()
        self._in_a_row: Counter[str] = Counter()

    def usable(self, order: Sequence[str]) -> list[str]:
        """Without those that are left out."""
        return [path for path in order if path not in self.left_out]

    def worked(self, path: str) -> None:
        if self._in_a_row:
            self._in_a_row.pop(path, None)

    def failed(self, path: str) -> bool:
        """Whether it is left out now."""
        self._in_a_row[path] += 1
        if self._in_a_row[path] == MOST_IN_A_ROW:
            self.left_out.add(path)
        return path in self.left_out

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself."""
        assert self.left_out == {path for path, count in self._in_a_row.items() if count >= MOST_IN_A_ROW}
        assert all(self._in_a_row.values())
