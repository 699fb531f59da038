"""StagingRing: segments of device memory that blocks pass through, whole, between a kernel and a copy.

    saves   kernel fills ─▶ copied to the pool ─▶ free            the kernel of one segment runs while
    loads   copied from the pool ─▶ kernel empties ─▶ free        another is being copied

Who comes to a segment waits, on the device, until it is free again; nobody waits on the CPU.
"""

from __future__ import annotations

import cupy  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import Stream, order_event, our_errors, stream
from services.worker.transfer.device_memory import DeviceMemory

SEGMENT_BYTES = 16 << 20
"""Half of it costs Python twice as much a byte: 8 ms a GB instead of 3, for blocks of 2 MiB."""
SEGMENTS = 3


class Segment:
    """One part of the ring."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._filled = order_event()
        self._freed = order_event()

    def await_free(self, on: Stream) -> None:
        on.wait_event(self._freed)

    def hand_over(self, begins: Stream, goes_on: Stream) -> None:
        """What `begins` was given for the segment is done before what `goes_on` is given from now on."""
        self._filled.record(begins)
        goes_on.wait_event(self._filled)

    def free(self, on: Stream) -> None:
        """When `on` has come so far."""
        self._freed.record(on)


class StagingRing:
    """One direction's; belongs to its thread."""

    def __init__(self, memory: DeviceMemory, block_bytes: int) -> None:
        """Raises DeviceMemoryExhausted."""
        self.segment_blocks = max(1, SEGMENT_BYTES // block_bytes)
        self._memory = memory
        with cupy.cuda.Device(memory.device), our_errors():
            self.kernels = stream()
            size_bytes = self.segment_blocks * block_bytes
            self._at = memory.allocate(SEGMENTS * size_bytes, self.kernels)
            self.kernels.synchronize()
            self._segments = [Segment(self._at + index * size_bytes) for index in range(SEGMENTS)]
        self._turn = 0

    def next(self, *, copying_first: bool, on: Stream) -> Segment:
        """The segment whose turn it is, free for what comes first: the copy on `on`, or the kernel."""
        segment = self._segments[self._turn]
        self._turn = (self._turn + 1) % SEGMENTS
        segment.await_free(on if copying_first else self.kernels)
        return segment

    def close(self) -> None:
        """Nothing is under way."""
        self._memory.free(self._at)
        with our_errors():
            self.kernels.synchronize()
