"""StagingRing: segments of device memory that hold blocks in one piece between a kernel and a copy.

    saves   kernel fills ─▶ copied to the pool ─▶ free            the kernel of one segment runs while
    loads   copied from the pool ─▶ kernel empties ─▶ free        another is being copied

Work for a segment waits on the device until the segment is free again; no thread waits on the CPU.
"""

from __future__ import annotations

import cupy  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import Stream, new_stream, order_event, translated_errors
from services.worker.transfer.device_memory import DeviceMemory

SEGMENT_BYTES = 16 << 20
"""The size of a segment. With half of it, Python takes 8 ms a GB instead of 3, for blocks of 2 MiB."""
SEGMENTS = 3
"""Segments in a ring."""


class Segment:
    """One part of the ring."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._filled = order_event()
        self._freed = order_event()

    def await_free(self, on: Stream) -> None:
        on.wait_event(self._freed)

    def hand_over(self, begins: Stream, goes_on: Stream) -> None:
        """Make later work on `goes_on` wait for the work on `begins` so far."""
        self._filled.record(begins)
        goes_on.wait_event(self._filled)

    def free(self, on: Stream) -> None:
        """Mark the segment as free once `on` has done its work so far."""
        self._freed.record(on)


class StagingRing:
    """The ring of one direction. It belongs to that direction's thread."""

    def __init__(self, memory: DeviceMemory, block_bytes: int) -> None:
        """Allocate the segments. Raise DeviceMemoryExhausted."""
        self.segment_blocks = max(1, SEGMENT_BYTES // block_bytes)
        self._memory = memory
        with cupy.cuda.Device(memory.device), translated_errors():
            self.kernels = new_stream()
            size_bytes = self.segment_blocks * block_bytes
            self._at = memory.allocate(SEGMENTS * size_bytes, self.kernels)
            self.kernels.synchronize()
            self._segments = [Segment(self._at + index * size_bytes) for index in range(SEGMENTS)]
        self._turn = 0

    def next_segment(self, *, copying_first: bool, on: Stream) -> Segment:
        """Return the next segment. The first work on it, the copy on `on` or the kernel, waits until it is free."""
        segment = self._segments[self._turn]
        self._turn = (self._turn + 1) % SEGMENTS
        segment.await_free(on if copying_first else self.kernels)
        return segment

    def close(self) -> None:
        """Free the segments. Nothing may be under way."""
        self._memory.free(self._at)
        with translated_errors():
            self.kernels.synchronize()
