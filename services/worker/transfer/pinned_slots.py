"""Which of the pool's slots are pinned, chunk by chunk.

    | chunk 0: slots 0 … n-1 | chunk 1: slots n … 2n-1 | …      whole slots: a copy across the border of two fails

    untouched ──ensure, prepare──▶ pinned          released all at once
                            └────▶ refused         copied as pageable memory

A chunk is pinned when a copy first needs it, or before, when there is nothing else to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from services.worker.transfer.errors import PinRefused

CHUNK_BYTES = 256 << 20
"""Pinned in one go: a copy waits 10 ms for it, or 130 ms where nobody has touched the pool yet."""

_log = logging.getLogger(__name__)


class PinnedSlots:
    """See the module. Threads may share it."""

    def __init__(
        self,
        at: int,
        slot_bytes: int,
        slots: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`register(address, size_bytes)` raises PinRefused; slots are whole pages."""
        self._at = at
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._register = register
        self._unregister = unregister
        self._per_chunk = max(1, chunk_bytes // slot_bytes)
        self._lock = threading.Lock()
        """Guards all below."""
        self._pinned: dict[int, bool] = {}
        """Chunks that are not untouched; False: refused."""
        self._next = 0
        """Chunks before it are not untouched."""

    @property
    def chunks(self) -> int:
        return -(-self._slots // self._per_chunk)

    @property
    def refused(self) -> int:
        """Chunks that CUDA would not pin."""
        return sum(not pinned for pinned in self._pinned.values())

    def ensure(self, slot: int) -> bool:
        """Whether the slot is pinned, which it is now if it can be."""
        assert 0 <= slot < self._slots
        chunk = slot // self._per_chunk
        pinned = self._pinned.get(chunk)  # once known, it stays so: no lock for the many copies that find it known
        if pinned is None:
            with self._lock:
                pinned = self._pin(chunk)
        return pinned

    def prepare(self) -> bool:
        """Pins one more chunk; False: none is untouched."""
        with self._lock:
            while self._next < self.chunks and self._next in self._pinned:
                self._next += 1
            if self._next < self.chunks:
                self._pin(self._next)
            return len(self._pinned) < self.chunks

    def release(self) -> None:
        """Nothing is copied any more; all is untouched again."""
        with self._lock:
            for chunk in [chunk for chunk, pinned in self._pinned.items() if pinned]:
                self._unregister(self._at + chunk * self._per_chunk * self._slot_bytes)
            self._pinned.clear()
            self._next = 0

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself."""
        assert all(0 <= chunk < self.chunks for chunk in self._pinned)
        assert all(chunk in self._pinned for chunk in range(self._next))

    def _pin(self, chunk: int) -> bool:
        """With the lock held."""
        if chunk in self._pinned:
            return self._pinned[chunk]
        first = chunk * self._per_chunk
        slots = min(self._per_chunk, self._slots - first)
        try:
            self._register(self._at + first * self._slot_bytes, slots * self._slot_bytes)
        except PinRefused as wrong:
            if all(self._pinned.values()):
                _log.warning("a chunk of the pool cannot be pinned, its copies will be slower: %s", wrong)
            self._pinned[chunk] = False
        else:
            self._pinned[chunk] = True
        return self._pinned[chunk]
