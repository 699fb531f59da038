"""Tells at once that files of a directory have changed, where the kernel does (inotify, on Linux)."""

from __future__ import annotations

import asyncio
import ctypes
import os
from contextlib import suppress
from pathlib import Path

SETTLE_S = 0.005
"""Seconds after a change within which others are taken up with it: a file is written aside and moved, and a lock is
free a moment after its file was closed."""
_CHANGES = 0x008 | 0x080 | 0x200
"""IN_CLOSE_WRITE, IN_MOVED_TO, IN_DELETE."""
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None)


class DirectoryEvents:
    """The changes in one directory, for one task that waits for them. Where the kernel tells of none, as when the user
    has as many of its watches as it allows (fs.inotify.max_user_instances), waits end at their limit."""

    def __init__(self, directory: Path) -> None:
        self._place = os.fsencode(directory)
        self._changed = asyncio.Event()
        made = hasattr(_libc, "inotify_init1")
        self._descriptor = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)) if made else -1
        if self._descriptor >= 0:
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def watch(self) -> None:
        """Hear of changes from now on. Called again, it also finds a directory that was deleted and made again."""
        if self._descriptor >= 0:
            _libc.inotify_add_watch(self._descriptor, self._place, _CHANGES)

    async def wait(self, limit_s: float) -> None:
        """Wait until there was a change since the last wait, `wake` was called, or `limit_s` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
                await asyncio.sleep(SETTLE_S)
        self._changed.clear()

    def wake(self) -> None:
        """End the wait."""
        self._changed.set()

    def close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._descriptor, _READ_BYTES)  # what is left is read at the loop's next turn
        self._changed.set()
