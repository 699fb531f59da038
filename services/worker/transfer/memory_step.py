"""MemoryStep: stands for a step of an engine's that does nothing but read device memory, to see what slows it.

Pieces as large as a layer's weights, read by a kernel each, in a graph: between two of them another kernel gets in.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import our_errors, stream
from services.worker.transfer.device_memory import DeviceMemory

STEP_S = 4e-3
"""About that of an 8B model on an H200."""
READ_BYTES = 512 << 20
"""Many times what a cache holds; less where the device has less …"""
PIECE_BYTES = 64 << 20
"""… but never less than a piece."""
THREADS = 512
_WORDS = PIECE_BYTES // 16
_WORDS_A_THREAD = 8
_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(THREADS) read_all(const uint4* __restrict__ from, unsigned* sink)
{
    const size_t first = (size_t)blockIdx.x * THREADS * WORDS_A_THREAD + threadIdx.x;
    unsigned sum = 0;
    #pragma unroll
    for (int i = 0; i < WORDS_A_THREAD; i++) {
        const uint4 word = from[first + i * THREADS];
        sum += word.x + word.y + word.z + word.w;
    }
    if (sum == 1) *sink = sum;  // else nobody would need the reads
}
"""


class MemoryStep:
    """See the module."""

    def __init__(self, device: int) -> None:
        """Raises DeviceMemoryExhausted where not even a piece is left, DeviceFailed."""
        self._memory = DeviceMemory(device)  # all of it goes back to the device in the end
        with our_errors():
            self._on = stream()
            free_bytes = int(runtime.memGetInfo()[0])
            pieces = max(1, min(READ_BYTES, free_bytes // 2) // PIECE_BYTES)
            self._at = self._memory.allocate(pieces * PIECE_BYTES, self._on)
            try:
                options = (f"-DTHREADS={THREADS}", f"-DWORDS_A_THREAD={_WORDS_A_THREAD}")
                self._kernel = cupy.RawKernel(_SOURCE, "read_all", options=options)
                self._sink = cupy.zeros(1, cupy.uint32)
                cupy.cuda.get_current_stream().synchronize()
                runtime.memsetAsync(self._at, 0, pieces * PIECE_BYTES, self._on.ptr)
                self._begun, self._ended = cupy.cuda.Event(), cupy.cuda.Event()
                self._graph = self._captured(pieces, pieces)
                self.took_s()
                self._graph = self._captured(pieces, ceil(STEP_S / self.took_s() * pieces))
                self.took_s()
            except BaseException:
                self.close()
                raise

    def took_s(self, beside: Callable[[], None] | None = None) -> float:
        """Of one step, during which `beside` was handed over. Raises DeviceFailed."""
        with our_errors():
            self._begun.record(self._on)
            self._graph.launch(self._on)
            self._ended.record(self._on)
            if beside is not None:
                beside()
            self._ended.synchronize()
            return float(cupy.cuda.get_elapsed_time(self._begun, self._ended)) / 1e3

    def close(self) -> None:
        """Nothing is under way."""
        self._memory.free(self._at)
        with our_errors():
            self._on.synchronize()
        self._memory.close()

    def _captured(self, pieces: int, launches: int) -> Any:
        """A graph that reads so many pieces in turn."""
        grid = (_WORDS // (THREADS * _WORDS_A_THREAD),)
        with self._on:
            self._kernel(grid, (THREADS,), (np.uintp(self._at), self._sink))  # loads it, which no capture may
            self._on.synchronize()
            self._on.begin_capture()
            for index in range(launches):
                at = self._at + index % pieces * PIECE_BYTES
                self._kernel(grid, (THREADS,), (np.uintp(at), self._sink))
            return self._on.end_capture()
