"""What `up` shows while it works: notices and progress on stderr, so that stdout has only what was asked for."""

from __future__ import annotations

import sys


class Terminal:
    """Notices, and below them one progress line that is drawn over (on a terminal) or told in steps of 10 % (else)."""

    def __init__(self) -> None:
        self._draws = sys.stderr.isatty()
        self._drawn = False
        self._told: dict[str, int] = {}

    def notice(self, text: str) -> None:
        """One line that stays."""
        self._write(f"{text}\n")
        self._drawn = False

    def progress(self, what: str, share: float) -> None:
        """How far something is, 0 … 1."""
        if self._draws:
            self._write(f"{what}: {share:4.0%}")
            self._drawn = True
            return
        step = int(share * 10)
        if self._told.get(what) != step:
            self._told[what] = step
            self._write(f"{what}: {step * 10} %\n")

    def clear(self) -> None:
        """Take the progress line away."""
        if self._drawn:
            self._write("")
            self._drawn = False

    def _write(self, text: str) -> None:
        sys.stderr.write(("\r\033[K" if self._drawn else "") + text)
        sys.stderr.flush()
