"""The pool's memory, made before a slot is granted: in the background, again and again where there is too little."""

from __future__ import annotations

import asyncio
import logging

from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import Prefault

AGAIN_AFTER_S = 5.0

_log = logging.getLogger(__name__)


class Reservation:
    """Of one pool."""

    def __init__(self, pool: HostPool, threads: int) -> None:
        self._pool = pool
        self._threads = threads
        self._prefault: Prefault | None = None
        self._size_bytes = pool.geometry.file_bytes
        self.complete = pool.reserved
        """All memory is there, for good."""
        self.problem = ""
        """Why the last try ended early."""

    @property
    def done_bytes(self) -> int:
        """How much memory is known to be there."""
        if self.complete:
            return self._size_bytes
        return 0 if self._prefault is None else self._prefault.done_bytes

    @property
    def share(self) -> float:
        """Of the pool."""
        return self.done_bytes / self._size_bytes

    @property
    def reason(self) -> str:
        """Why nothing is granted; empty: it is."""
        if self.complete:
            return ""
        why = f" ({self.problem}, tried again)" if self.problem else ""
        return f"making the pool's memory: {10 * int(10 * self.share)} %{why}"

    async def run(self) -> None:
        """Until it is complete."""
        while not self.complete:
            failure = await self._try()
            if failure and failure != self.problem:
                _log.error("the pool's memory cannot be made: %s; tried again every %g s", failure, AGAIN_AFTER_S)
            self.problem = failure
            if not self.complete:
                await asyncio.sleep(AGAIN_AFTER_S)
        _log.info("the pool's memory is there: %d bytes", self._size_bytes)

    async def _try(self) -> str:
        """Why it ended early; empty: it did not."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def ended() -> None:
            loop.call_soon_threadsafe(over.set)

        prefault = self._prefault = self._pool.prefault(self._threads, ended)
        prefault.start()
        try:
            await over.wait()
        finally:
            prefault.stop()  # a chunk at most: the pool is closed next
        self.complete = prefault.complete
        return prefault.failure
