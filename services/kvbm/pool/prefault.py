"""Allocates and zeroes the pool's memory before a slot is granted, in threads of low priority.

Until all of it is there no slot may be granted. Touching a page that the file system has no room for ends the process
that touches it, here and in an engine. A first touch of fresh memory also takes several times as long as a copy.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from services.kvbm.pool.host_pool import HostPool
from shared.pool.map import touch

CHUNK_BYTES = 64 << 20
NICENESS = 10
"""The priority of the threads (nice value): other work of the machine goes first."""
RETRY_AFTER_S = 5.0
"""Seconds until the next try, after there was too little memory."""

_log = logging.getLogger(__name__)


class Prefault:
    """Makes the memory of one pool in up to `threads` threads, and tries again if there is too little."""

    def __init__(self, pool: HostPool, threads: int) -> None:
        self._descriptor = pool.descriptor
        self._size_bytes = pool.geometry.file_bytes
        self._threads = threads
        self.complete = pool.reserved
        """Whether all memory is there, for good."""
        self.done_bytes = self._size_bytes if self.complete else 0
        """How much memory is known to be there."""
        self.problem = ""
        """Why the last try ended early; empty if it did not."""

    @property
    def share(self) -> float:
        """The share of the pool's memory that is there, from 0 to 1."""
        return self.done_bytes / self._size_bytes

    @property
    def reason(self) -> str:
        """Why no slot is granted; empty once the memory is complete."""
        if self.complete:
            return ""
        why = f" ({self.problem}, tried again)" if self.problem else ""
        return f"making the pool's memory: {10 * int(10 * self.share)} %{why}"

    async def run(self) -> None:
        """Return when the memory is complete. Cancelling it waits for the chunks that threads are at: the pool may be
        closed then."""
        while not self.complete:
            problem = await self._try()
            if problem and problem != self.problem:
                _log.error("the pool's memory cannot be made: %s; tried again every %g s", problem, RETRY_AFTER_S)
            self.problem = problem
            if not self.complete:
                await asyncio.sleep(RETRY_AFTER_S)
        _log.info("the pool's memory is complete: %d bytes", self._size_bytes)

    async def _try(self) -> str:
        """Make all chunks once. Return why it ended early; empty if it did not."""
        loop = asyncio.get_running_loop()
        self.done_bytes = 0
        starts = iter(range(0, self._size_bytes, CHUNK_BYTES))

        problem = ""

        async def work(executor: ThreadPoolExecutor) -> None:
            nonlocal problem
            for start in starts:
                length = min(CHUNK_BYTES, self._size_bytes - start)
                try:
                    await loop.run_in_executor(executor, make_memory, self._descriptor, start, length)
                except OSError as wrong:  # the others end after their chunk; an exception would cancel their waits
                    problem = wrong.strerror or repr(wrong)
                    return
                self.done_bytes += length
                if problem:
                    return

        with ThreadPoolExecutor(self._threads, "prefault", _lower_priority) as executor:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._threads):
                    group.create_task(work(executor))
        self.complete = self.done_bytes == self._size_bytes
        return problem


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux this is the thread's alone


def make_memory(descriptor: int, start: int, length: int) -> None:
    """Allocate and touch these bytes of the file; what was written there stays. Blocking.

    Raise OSError (ENOSPC, ENOMEM) if there is no memory for them.
    """
    os.posix_fallocate(descriptor, start, length)
    with mmap.mmap(descriptor, length, offset=start) as mapping, memoryview(mapping) as memory:
        try:
            touch(memory)
        except OSError as wrong:
            if wrong.errno != errno.EINVAL:  # on an older kernel the memory is there, and zeroed at its first touch
                raise
