"""An error as one line, for reports. Pure."""

from __future__ import annotations

CHARACTERS = 1000
"""Most characters of the line; vLLM's validation may print a whole request."""


def one_line(wrong: BaseException | None) -> str:
    """Return the error's class and text in one line."""
    return f"{type(wrong).__name__}: {' '.join(str(wrong).split())}"[:CHARACTERS]
