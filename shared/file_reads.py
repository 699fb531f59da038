"""Reads files in a thread, for a bounded time and one read at a time: a file system may be slow, or hang.

A process has few threads, and needs them for more. So a read that hangs keeps one, however often it is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

READ_LIMIT_S = 2.0
"""Seconds that a read may take, and the one before it that still hangs."""


class FileReads:
    """The reads of one user. Used on one event loop."""

    def __init__(self) -> None:
        self._latest: asyncio.Future[Any] | None = None

    async def read(self, files: Callable[[], T]) -> T:
        """Return what `files` returns, which runs in a thread. Raise what it raises, and TimeoutError."""
        async with asyncio.timeout(READ_LIMIT_S):
            if self._latest is not None:
                await asyncio.wait((self._latest,))
                self._latest.exception()  # that of a read which was given up is of no interest
            latest: asyncio.Future[T] = asyncio.get_running_loop().run_in_executor(None, files)
            self._latest = latest
            await asyncio.wait((latest,))  # it cancels nothing when it ends early
            return latest.result()
