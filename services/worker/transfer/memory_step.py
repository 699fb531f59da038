"""MemoryStep: stands for an engine's step. It only reads device memory, so that one can measure what slows a step.

It is a graph of kernels, each of which reads a piece as large as a layer's weights. Between two of them another kernel
can start.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import new_stream, translated_errors
from services.worker.transfer.device_memory import DeviceMemory

STEP_S = 4e-3
"""The length of a step: about that of an 8B model on an H200."""
READ_BYTES = 512 << 20
"""The memory that a step reads in turn: many times a cache's size. A device with less free memory reads less, but at
least one piece."""
PIECE_BYTES = 64 << 20
"""The memory that one kernel reads."""
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
    if (sum == 1) *sink = sum;  // otherwise the compiler would drop the reads
}
"""


class MemoryStep:
    """A stand-in for an engine's step that reads device memory."""

    def __init__(self, device: int) -> None:
        """Capture the step. Raises DeviceMemoryExhausted if the device has no room for one piece, and DeviceFailed."""
        self._memory = DeviceMemory(device)  # a pool of its own, so that all of it goes back to the device
        with translated_errors():
            self._on = new_stream()
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
                self.run_s()
                self._graph = self._captured(pieces, ceil(STEP_S / self.run_s() * pieces))
                self.run_s()
            except BaseException:
                self.close()
                raise

    def run_s(self, beside: Callable[[], None] | None = None) -> float:
        """Run one step and return its seconds. `beside` is called while it runs. Raises DeviceFailed."""
        with translated_errors():
            self._begun.record(self._on)
            self._graph.launch(self._on)
            self._ended.record(self._on)
            if beside is not None:
                beside()
            self._ended.synchronize()
            return float(cupy.cuda.get_elapsed_time(self._begun, self._ended)) / 1e3

    def close(self) -> None:
        """Free the memory. Nothing may be under way."""
        self._memory.free(self._at)
        with translated_errors():
            self._on.synchronize()
        self._memory.close()

    def _captured(self, pieces: int, launches: int) -> Any:
        """Capture a graph of `launches` kernels that read the `pieces` in turn."""
        grid = (_WORDS // (THREADS * _WORDS_A_THREAD),)
        with self._on:
            self._kernel(
                grid, (THREADS,), (np.uintp(self._at), self._sink)
            )  # loads the kernel, which a capture must not do
            self._on.synchronize()
            self._on.begin_capture()
            for index in range(launches):
                at = self._at + index % pieces * PIECE_BYTES
                self._kernel(grid, (THREADS,), (np.uintp(at), self._sink))
            return self._on.end_capture()
