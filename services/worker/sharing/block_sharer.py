"""BlockSharer: a prefill worker's end of all shares. It shares as soon as the engine holds its lock, and again after
the engine's memory has changed. Where it cannot open its socket, it tries again."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable
from pathlib import Path

from services.worker.sharing.memory import SharableMemory
from services.worker.sharing.messages import SharingIdentity
from services.worker.sharing.page_sharer import PageSharer, SharableBlocks
from services.worker.sharing.shares import SharingLimits
from shared.hashing import ContentKey
from shared.pool.format import PoolUnfit

WATCH_INTERVAL_S = 0.25
"""Seconds between two looks at whether readers are dead, while any are there."""
OPEN_RETRY_S = 1.0
"""Seconds until the next try after the socket could not be opened. A try takes less than a millisecond."""
_GENERATION_BYTES = 7

_log = logging.getLogger(__name__)


class BlockSharer:
    """A Sharer of one engine, in the directory of its kvbm's pool."""

    def __init__(
        self,
        directory: Path,
        memory: Callable[[], SharableMemory],
        identity: SharingIdentity,
        blocks: SharableBlocks,
        limits: SharingLimits,
    ) -> None:
        """`memory` returns the engine's present memory. While it has no pages, nothing is shared."""
        self._directory = directory
        self._memory = memory
        self._identity = identity
        self._blocks = blocks
        self._limits = limits
        self._owner = ""
        """The owner id for new shares. Empty while sharing is off."""
        self._sharer: PageSharer | None = None
        self.failing = False
        """Whether the socket could not be opened at the last try, so that nothing is shared now."""
        self.failures = 0
        """How often it could not be opened."""
        self._retry_s = 0.0
        """When to try again, while `failing`."""
        self._watch_s = 0.0
        """When to look at the readers' locks next."""
        self._poller = select.epoll()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `turn` has something to do."""
        return self._poller.fileno()

    def turn(self, owner: str, now_s: float) -> None:
        if owner != self._owner or (self.failing and now_s >= self._retry_s):
            self._open(owner, now_s)
        if self._sharer is not None:
            self._sharer.turn(now_s)
            if now_s >= self._watch_s:
                self._watch_s = now_s + WATCH_INTERVAL_S
                self._sharer.watch()

    def is_shared(self, key: ContentKey) -> bool:
        return self._sharer is not None and self._sharer.sharing.is_shared(key)

    @property
    def wait_until_s(self) -> float | None:
        if self._sharer is None:
            return self._retry_s if self.failing else None
        watch_s = self._watch_s if self._sharer.sharing.readers else None
        return min((due_s for due_s in (watch_s, self._sharer.wait_until_s) if due_s is not None), default=None)

    def close(self) -> None:
        self._owner = ""
        self.failing = False
        if self._sharer is not None:
            self._poller.unregister(self._sharer.fileno())
            self._sharer.close_sharing()
            self._sharer.close()
            self._sharer = None

    def _open(self, owner: str, now_s: float) -> None:
        failed_before = self.failing
        self.close()
        self._owner = owner
        memory = self._memory()
        if memory.pages is None:  # after a sleep there was none to share; `pages_to_share` has said so
            return
        generation = 1 + int.from_bytes(os.urandom(_GENERATION_BYTES), "little")
        try:
            self._sharer = PageSharer(
                *(self._directory, owner, memory.pages, memory.shape, self._identity, generation),
                *(self._blocks, self._limits),
            )
        except (OSError, PoolUnfit) as wrong:
            self.failing, self._retry_s = True, now_s + OPEN_RETRY_S
            self.failures += 1
            if not failed_before:
                _log.warning(
                    "this engine shares no blocks, which decode workers get from the kvbm only; it tries again every"
                    " %g s: %s",
                    *(OPEN_RETRY_S, wrong),
                )
            return
        self._poller.register(self._sharer.fileno(), select.EPOLLIN)
        if failed_before:
            _log.info("this engine shares blocks again")
