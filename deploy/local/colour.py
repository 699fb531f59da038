"""Colours for people: on a terminal only, and not where NO_COLOR is set (no-color.org)."""

from __future__ import annotations

import os
import re
from typing import Literal, TextIO

Style = Literal["bold", "dim", "red", "green", "yellow"]
_CODES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
_HEAD = re.compile(r"^[A-Z][A-Z0-9/]*(?: {1,}[A-Z][A-Z0-9/]*)+$", re.MULTILINE)
"""The head of a table: only words in capitals."""
_REMARK = re.compile(r"^(?:note|refused|unreadable|gone|no answer):", re.MULTILINE)


def coloured(stream: TextIO) -> bool:
    """Return whether a stream shows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: Style, stream: TextIO) -> str:
    """Return the text in a style, or as it is if the stream shows no colours."""
    return f"\033[{_CODES[style]}m{text}\033[0m" if coloured(stream) else text


def highlight(text: str, stream: TextIO) -> str:
    """Return tables with their heads in bold, and remarks with their first word in yellow."""
    text = _HEAD.sub(lambda head: paint(head[0], "bold", stream), text)
    return _REMARK.sub(lambda word: paint(word[0], "yellow", stream), text)
