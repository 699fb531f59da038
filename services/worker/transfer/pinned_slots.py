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
ADVICE = (
    "its blocks are copied the slow way. Let the pool lie in memory, such as /dev/shm or hugetlbfs, as Linux pins no"
    " file that lies on a disk; and let the worker lock memory if a limit keeps it from that (ulimit -l, LimitMEMLOCK,"
    " docker run --ulimit memlock=-1)"
)

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
        clock: Callable[[], float],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`register(address, size_bytes)` raises PinRefused; slots are whole pages."""
        self.whole = False
        """Whether all of them are pinned; once, it stays so until they are released."""
        self._at = at
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._register = register
        self._unregister = unregister
        self._clock = clock
        self._per_chunk = max(1, chunk_bytes // slot_bytes)
        self._lock = threading.Lock()
        """Guards all below."""
        self._pinned: dict[int, bool] = {}
        """Chunks that are not untouched; False: refused."""
        self._next = 0
        """Chunks before it are not untouched."""
        self._took_s = 0.0
        """For pinning, so far."""

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
            self._took_s = 0.0
            self.whole = False

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself."""
        assert all(0 <= chunk < self.chunks for chunk in self._pinned)
        assert all(chunk in self._pinned for chunk in range(self._next))
        assert self.whole == (len(self._pinned) == self.chunks and all(self._pinned.values()))

    def _pin(self, chunk: int) -> bool:
        """With the lock held."""
        if chunk in self._pinned:
            return self._pinned[chunk]
        if not self._pinned:
            _log.info("pinning %d bytes of the pool, in %d pieces", self._slots * self._slot_bytes, self.chunks)
        first = chunk * self._per_chunk
        size_bytes = min(self._per_chunk, self._slots - first) * self._slot_bytes
        begun_s = self._clock()
        try:
            self._register(self._at + first * self._slot_bytes, size_bytes)
        except PinRefused as wrong:
            if all(self._pinned.values()):
                _log.warning("%d bytes of the pool cannot be pinned (%s): %s", size_bytes, wrong, ADVICE)
            self._pinned[chunk] = False
        else:
            self._pinned[chunk] = True
        self._took_s += self._clock() - begun_s
        if len(self._pinned) == self.chunks:
            self.whole = not self.refused
            _log.info("pinned %d bytes of the pool in %.2f s", self._pinned_bytes, self._took_s)
        return self._pinned[chunk]

    @property
    def _pinned_bytes(self) -> int:
        whole = sum(self._pinned.values()) * self._per_chunk
        short = self.chunks * self._per_chunk - self._slots if self._pinned.get(self.chunks - 1) else 0
        return (whole - short) * self._slot_bytes
