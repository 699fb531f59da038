"""What people see in a terminal: colours, and what `up` shows on stderr while it works."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from typing import Literal, TextIO

BAR_CHARACTERS = 30
"""The maximum width of the bar after a percentage; a narrow terminal has a shorter one, or none."""
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


class Terminal:
    """Writes notices, and below them the progress: on a terminal one line with a bar, else lines in steps of 10
    %."""

    def __init__(self) -> None:
        self._draws = sys.stderr.isatty()
        self._drawn = False
        self._shown_steps: dict[str, int] = {}

    def notice(self, text: str) -> None:
        """Write a line that stays."""
        self._write(f"{text}\n")
        self._drawn = False

    def progress(self, what: str, share: float) -> None:
        """Show which share of a task is done, 0 … 1."""
        if self._draws:
            text = f"{what}: {share:4.0%}"
            room = min(BAR_CHARACTERS, shutil.get_terminal_size().columns - len(text) - 4)
            self._write(text + (f" [{'#' * int(share * room):<{room}}]" if room > 0 else ""))
            self._drawn = True
            return
        step = int(share * 10)
        if self._shown_steps.get(what) != step:
            self._shown_steps[what] = step
            self._write(f"{what}: {step * 10} %\n")

    def clear(self) -> None:
        """Remove the progress line."""
        if self._drawn:
            self._write("")
            self._drawn = False

    def _write(self, text: str) -> None:
        with suppress(OSError):  # its reader may have ended, and an `up` must still stop
            sys.stderr.write(("\r\033[K" if self._drawn else "") + text)
            sys.stderr.flush()
