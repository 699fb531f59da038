"""What `up` shows while it works: notices and progress on stderr, so that stdout has only what was asked for."""

from __future__ import annotations

import shutil
import sys

BAR_CHARACTERS = 30
"""The maximum width of the bar after a percentage; a narrow terminal has a shorter one, or none."""


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
        sys.stderr.write(("\r\033[K" if self._drawn else "") + text)
        sys.stderr.flush()
