"""Text for people of what `headrace check` found. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from deploy.local.check.verdicts import State, Verdict

LEAST_COLUMNS, MOST_COLUMNS = 40, 120
STATES: tuple[State, ...] = ("ok", "warn", "bad", "skipped")
_INDENT = " " * 9
_TEXT_LIMIT = 600
"""Characters of one text at most: servers and peers choose some of them."""


def render(verdicts: Sequence[Verdict], columns: int) -> str:
    """Return all verdicts with what they mean and what to set, and how many there are of each state."""
    columns = min(max(columns, LEAST_COLUMNS), MOST_COLUMNS)
    lines: list[str] = []
    for each in verdicts:
        lines += _wrapped(f"{each.state:<9}{each.name}: {each.shown}", columns, "")
        lines += _wrapped(each.meaning, columns, _INDENT)
        if each.advice:
            lines += _wrapped(f"set: {each.advice}", columns, _INDENT)
    return "\n".join([*lines, "", counted(verdicts)])


def counted(verdicts: Iterable[Verdict]) -> str:
    """Return how many verdicts there are of each state."""
    counts = Counter(each.state for each in verdicts)
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    return textwrap.wrap(plain(text), columns, initial_indent=indent, subsequent_indent=_INDENT, break_on_hyphens=False)


def plain(text: str) -> str:
    """Return a text without control characters, which could move the cursor, cut off at its limit."""
    clean = "".join(each if each.isprintable() else " " for each in text[: _TEXT_LIMIT + 1])
    return clean if len(clean) <= _TEXT_LIMIT else f"{clean[: _TEXT_LIMIT - 1]}…"
