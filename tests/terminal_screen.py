"""A program in a terminal of its own, whose screen a test reads: a real pty, and pyte as the terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte

LIMIT_S = 120.0
QUIET_S = 0.05
"""Seconds without output after which a view is taken to be whole."""


class TerminalScreen:
    """One running program and what its terminal shows."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, columns: int, rows: int) -> None:
        self.process = process
        self.screen: Any = pyte.Screen(columns, rows)
        self.raw = bytearray()
        """All that the program has written."""
        self._stream: Any = pyte.ByteStream(self.screen)
        self._master = master
        self._slave = slave
        self.first_modes = self.modes()
        self.is_gone = False

    @property
    def lines(self) -> list[str]:
        """The rows of the screen, without spaces at their ends."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def read(self, wait_s: float) -> bool:
        """Take what the program has written; whether there was anything."""
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        data = os.read(self._master, 1 << 16)
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, seen: Callable[[str], object], what: str, limit_s: float = LIMIT_S) -> str:
        """Read until the screen is so; return its text."""
        deadline = time.monotonic() + limit_s
        while self.read(QUIET_S) or not seen(self.text):
            assert time.monotonic() < deadline, f"not within {limit_s} s: {what}\n{self.text}"
            assert self.process.poll() is None, f"ended with {self.process.poll()} before {what}\n{self.text}"
        return self.text

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size, and let the program know."""
        self.screen.resize(rows, columns)
        termios.tcsetwinsize(self._slave, (rows, columns))
        self.process.send_signal(signal.SIGWINCH)  # the kernel sends it where the terminal controls the program

    def hang_up(self) -> None:
        """Close the terminal, as an ssh connection that breaks does."""
        os.close(self._master)
        self.is_gone = True

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def ended(self, limit_s: float = LIMIT_S) -> int:
        """Read until the program has ended; return its exit status."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"did not end within {limit_s} s\n{self.text}"
            self.read(0.1)
        while self.read(0.0):
            pass
        return self.process.returncode


@contextmanager
def terminal_screen(
    words: Sequence[str], variables: Mapping[str, str], *, cwd: Path, columns: int = 80, rows: int = 24
) -> Iterator[TerminalScreen]:
    """Run a program in a terminal of this size. It is killed if it still runs in the end."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (rows, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONUTF8": "1", **variables}
    process = subprocess.Popen(
        words, cwd=cwd, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    terminal = TerminalScreen(process, master, slave, columns, rows)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if not terminal.is_gone:
            os.close(master)
        os.close(slave)
