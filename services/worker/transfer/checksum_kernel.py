"""Computes checksums of blocks on the device, whatever their shape; `block_checksum` defines the checksum."""

from __future__ import annotations

from collections.abc import Sequence

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.block_checksum import FACTOR, STEP
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.cuda import ANYWHERE, Stream, sleeping_event, translated_errors

MOST_BLOCKS = 128
"""The most blocks that one launch takes."""
THREADS = 256
PARTS = 8
"""Thread blocks that share the words of one block."""
_SOURCE = r"""
typedef unsigned long long Word;
struct Slots { long long at[MOST_BLOCKS]; };

extern "C" __global__ void checksum(
    const __grid_constant__ Slots slots, const long long* __restrict__ regions, const long long fragment_bytes,
    const long long stride_bytes, const long long block_bytes, Word* sums)
{
    const long long offset = slots.at[blockIdx.y] * stride_bytes, words = (block_bytes + 7) / 8;
    Word sum = 0;
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
        Word word = 0;
#if ALIGNED
        word = *(const Word*)(regions[i * 8 / fragment_bytes] + offset + i * 8 % fragment_bytes);
#else
        for (long long at = i * 8; at < i * 8 + 8 && at < block_bytes; at++) {
            const long long from = regions[at / fragment_bytes] + offset + at % fragment_bytes;
            word |= (Word) * (const unsigned char*)from << 8 * (at % 8);
        }
#endif
        const Word held = (word ^ (Word)(i + 1) * STEP) * FACTOR;
        sum += held ^ held >> 32;
    }
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[blockIdx.y], sum);
}
"""


class ChecksumKernel:
    """The compiled kernel for one shape of blocks. It belongs to one thread."""

    def __init__(self, shape: BlockShape) -> None:
        """Prepare the kernel; its first launch compiles it, if CuPy has not cached it."""
        aligned = shape.word_bytes(16) == 16
        options = (
            f"-DMOST_BLOCKS={MOST_BLOCKS}",
            f"-DSTEP={STEP:#x}ull",
            f"-DFACTOR={FACTOR:#x}ull",
            f"-DALIGNED={aligned:d}",
        )
        self._slots = np.zeros((), np.dtype([("at", np.int64, (MOST_BLOCKS,))]))
        with translated_errors():
            self._kernel = cupy.RawKernel(_SOURCE, "checksum", options=options)
            self._regions = cupy.asarray(np.array(shape.regions, np.int64))
            self._sums = cupy.empty(MOST_BLOCKS, cupy.uint64)
            cupy.cuda.get_current_stream().synchronize()
        sizes = (shape.fragment_bytes, shape.stride_bytes, shape.block_bytes)
        self._arguments = (self._slots, self._regions, *map(np.int64, sizes), self._sums)

    def checksums(self, slots: Sequence[int], on: Stream) -> list[int]:
        """Return the checksum of each of these device slots, after all earlier work on `on`.

        The calling thread sleeps until then. Raise DeviceFailed.
        """
        sums: list[int] = []
        for first in range(0, len(slots), MOST_BLOCKS):
            part = slots[first : first + MOST_BLOCKS]
            self._slots["at"][: len(part)] = part
            sums_here, done = np.empty(len(part), np.uint64), sleeping_event()
            with translated_errors(), on:
                runtime.memsetAsync(self._sums.data.ptr, 0, sums_here.nbytes, on.ptr)
                self._kernel((PARTS, len(part)), (THREADS,), self._arguments)
                runtime.memcpyAsync(sums_here.ctypes.data, self._sums.data.ptr, sums_here.nbytes, ANYWHERE, on.ptr)
                done.record(on)
                done.synchronize()
            sums += sums_here.tolist()
        return sums
