"""Which paths a group of blocks takes, best first, and which of them keep failing. Pure.

    a block is …            fewer than MANY_BLOCKS          MANY_BLOCKS or more
    one piece               rows, batch                     batch, rows
    several fragments       rows, staged, batch             staged, rows, batch
    a part of one           direct, rows, batch             direct, rows, batch

    works ──fails──▶ failing ──MOST_IN_A_ROW──▶ left out, for good
      ▲─────works────────┘

A path that the driver or the shape of the blocks does not offer is left out. A copy a block begins soonest; the other
paths keep the link busier. docs/decisions/0029 has the measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

MANY_BLOCKS = 16
"""Fewest blocks of a group that is copied in one call, or through a staging ring."""
MOST_IN_A_ROW = 3
"""Failures in a row after which a path is left out."""


def path_order(blocks: int, offered: Collection[str], *, fragments: int, forced: str = "auto") -> tuple[str, ...]:
    """Return the offered paths for a group of `blocks`, best first; a `forced` path goes before all others."""
    many = ("direct", "staged", "rows", "batch") if fragments > 1 else ("batch", "rows")
    order = ("direct", "rows", "staged", "batch") if blocks < MANY_BLOCKS else many
    return tuple(path for path in dict.fromkeys((forced, *order)) if path in offered)


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
