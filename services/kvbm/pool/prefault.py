"""The pool's memory is made before it is needed: allocated and zeroed, chunk by chunk, in threads of low priority.

Until that is done no slot may be granted: touching a page that the file system has no room for ends the process that
touches it, here and in an engine. A first touch of fresh memory also takes several times as long as a copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable

from shared.pool.map import touch

CHUNK_BYTES = 64 << 20
NICENESS = 10
"""The threads' own: whoever computes goes first."""


class Prefault:
    """One pass over a file. `threads` bounds how many cores it takes."""

    def __init__(self, descriptor: int, size_bytes: int, threads: int, ended: Callable[[], None]) -> None:
        """`ended` is called once, by the last thread, when there is nothing more to do; see `failure` then."""
        assert threads > 0
        self.size_bytes = size_bytes
        self.failure = ""
        """Why it ended early; empty: it did not."""
        self.stopping = threading.Event()
        self._descriptor = os.dup(descriptor)
        self._ended = ended
        self._lock = threading.Lock()
        self._next = 0
        self._done_bytes = 0
        self._running = threads
        self._threads = [threading.Thread(target=self._work, name=f"prefault-{n}", daemon=True) for n in range(threads)]

    @property
    def done_bytes(self) -> int:
        """Progress, up to `size_bytes`."""
        return self._done_bytes

    @property
    def complete(self) -> bool:
        return self._done_bytes == self.size_bytes

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when no thread runs any more, after a chunk at most. Blocking; idempotent. Once started."""
        self.stopping.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # Linux: of this thread
        while (chunk := self._take()) is not None:
            start, length = chunk
            try:
                _make(self._descriptor, start, length)
            except OSError as wrong:
                self.failure = wrong.strerror or str(wrong)
                self.stopping.set()
                break
            with self._lock:
                self._done_bytes += length
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            os.close(self._descriptor)
            self._ended()

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            start = self._next
            if self.stopping.is_set() or start >= self.size_bytes:
                return None
            self._next = min(start + CHUNK_BYTES, self.size_bytes)
            return start, self._next - start


def _make(descriptor: int, start: int, length: int) -> None:
    """Raises OSError (ENOSPC, ENOMEM) where there is no memory for it."""
    os.posix_fallocate(descriptor, start, length)
    with mmap.mmap(descriptor, length, offset=start) as mapping, memoryview(mapping) as memory:
        try:
            touch(memory)
        except OSError as wrong:
            if wrong.errno != errno.EINVAL:  # an older kernel: the memory is there, and zeroed at its first touch
                raise
