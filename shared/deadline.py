"""A deadline for all reads of an answer together, which no timeout of a library covers.

begin ─▶ wait until the time is over ─▶ late: `cut` ends the read under way, in another thread
             ▲ extend      └─▶ end
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Deadline:
    """A thread that calls `cut` once the time is over, unless the block has ended before."""

    def __init__(self, limit_s: float, cut: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self.late = False
        """Whether the time is over, and `cut` was or is being called."""
        self._cut = cut
        self._until_s = time.monotonic() + limit_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadline", daemon=True)

    def __enter__(self) -> Deadline:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def extend(self) -> None:
        """Begin the time again."""
        self._until_s = time.monotonic() + self.limit_s

    def _run(self) -> None:
        while (left_s := self._until_s - time.monotonic()) > 0:
            if self._over.wait(left_s):
                return
        self.late = True
        self._cut()


def cut_connection(connection: socket.socket) -> None:
    """End all reads and writes of a socket that another thread is using, with TLS or without."""
    with suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own method is not for two threads
