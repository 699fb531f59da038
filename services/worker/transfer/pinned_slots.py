"""Pins the pool's slots chunk by chunk, and knows which slots are pinned.

    | chunk 0: slots 0 … n-1 | chunk 1: slots n … 2n-1 | …      whole slots: a copy across two chunks would fail

    untouched ──ensure_pinned, pin_next_chunk──▶ pinned         unpinned all at once
                                           └───▶ refused        copied as pageable memory

A chunk is pinned when a copy first needs it, or earlier, when the lane has nothing else to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from services.worker.transfer.errors import PinRefused

CHUNK_BYTES = 256 << 20
"""The size of a chunk. A copy waits 10 ms for its pinning, or 130 ms if no process has touched these pages yet."""
ADVICE = (
    "their blocks are copied more slowly. Put the pool into memory, such as /dev/shm or hugetlbfs, as Linux pins no"
    " file that lies on a disk; if a limit keeps the worker from locking memory, raise it (ulimit -l, LimitMEMLOCK,"
    " docker run --ulimit memlock=-1)"
)

_log = logging.getLogger(__name__)


class PinnedSlots:
    """The chunks of one pool. Threads may share it."""

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
        """Start with every chunk untouched.

        Slots are whole pages. `register(address, size_bytes)` raises PinRefused.
        """
        self.all_pinned = False
        """Whether all slots are pinned; it stays true until `unpin_all`."""
        self._at = at
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._register = register
        self._unregister = unregister
        self._clock = clock
        self._per_chunk = max(1, chunk_bytes // slot_bytes)
        self._lock = threading.Lock()
        """Guards all fields below."""
        self._pinned: dict[int, bool] = {}
        """Whether each chunk that was tried is pinned; False means that CUDA refused it."""
        self._next = 0
        """The first chunk that may be untouched."""
        self._took_s = 0.0
        """Seconds spent on pinning."""

    @property
    def chunks(self) -> int:
        return -(-self._slots // self._per_chunk)

    def ensure_pinned(self, slot: int) -> bool:
        """Pin the slot's chunk if it is untouched; return whether the slot is pinned."""
        assert 0 <= slot < self._slots
        chunk = slot // self._per_chunk
        pinned = self._pinned.get(chunk)  # the answer never changes, so most copies need no lock
        if pinned is None:
            with self._lock:
                pinned = self._pin(chunk)
        return pinned

    def pin_next_chunk(self) -> bool:
        """Pin one more chunk. Return False once no chunk is untouched."""
        with self._lock:
            while self._next < self.chunks and self._next in self._pinned:
                self._next += 1
            if self._next < self.chunks:
                self._pin(self._next)
            return len(self._pinned) < self.chunks

    def unpin_all(self) -> None:
        """Unpin all chunks, so that all are untouched again. No copy may be under way."""
        with self._lock:
            for chunk in [chunk for chunk, pinned in self._pinned.items() if pinned]:
                self._unregister(self._at + chunk * self._per_chunk * self._slot_bytes)
            self._pinned.clear()
            self._next = 0
            self._took_s = 0.0
            self.all_pinned = False

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert all(0 <= chunk < self.chunks for chunk in self._pinned)
        assert all(chunk in self._pinned for chunk in range(self._next))
        assert self.all_pinned == (len(self._pinned) == self.chunks and all(self._pinned.values()))

    def _pin(self, chunk: int) -> bool:
        """Pin one chunk; the caller holds the lock."""
        if chunk in self._pinned:
            return self._pinned[chunk]
        if not self._pinned:
            _log.info("pinning %d bytes of the pool in %d chunks", self._slots * self._slot_bytes, self.chunks)
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
            self.all_pinned = all(self._pinned.values())
            _log.info("pinned %d bytes of the pool in %.2f s", self._pinned_bytes, self._took_s)
        return self._pinned[chunk]

    @property
    def _pinned_bytes(self) -> int:
        whole = sum(self._pinned.values()) * self._per_chunk
        short = self.chunks * self._per_chunk - self._slots if self._pinned.get(self.chunks - 1) else 0
        return (whole - short) * self._slot_bytes
