"""A kernel that copies blocks of fragments from another GPU's memory, or another process's, into one's own."""

from __future__ import annotations

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.cuda import Stream, translated_errors

MOST_BLOCKS = 256
"""The most blocks of a launch. Their slots are passed by value: 2 KiB of the 4 KiB that any device accepts."""
THREADS = 512
MULTIPROCESSORS = 32
"""The multiprocessors that a launch keeps busy."""
_WORDS = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}
_PLACES = np.dtype([("source", np.int32, (MOST_BLOCKS,)), ("to", np.int32, (MOST_BLOCKS,))])
_SOURCE = r"""
struct Places { int source[MOST_BLOCKS]; int to[MOST_BLOCKS]; };

extern "C" __global__ void __launch_bounds__(THREADS) pull_blocks(
    const __grid_constant__ Places places, const int blocks, const long long* __restrict__ sources,
    const long long* __restrict__ targets, const unsigned fragments, const long long source_stride,
    const long long target_stride, const unsigned words)
{
    const unsigned total = fragments * words, step = gridDim.x * blockDim.x;
    for (int block = blockIdx.y; block < blocks; block += gridDim.y) {
        const long long from = places.source[block] * source_stride, to = places.to[block] * target_stride;
        for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += 4 * step) {
            WORD held[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned at = first + i * step;
                if (at < total) held[i] = ((const WORD*)(sources[at / words] + from))[at % words];
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned at = first + i * step;
                if (at < total) ((WORD*)(targets[at / words] + to))[at % words] = held[i];
            }
        }
    }
}
"""


class ShareKernel:
    """The compiled kernel for two shapes of the same blocks. It belongs to one thread."""

    def __init__(self, theirs: BlockShape, own: BlockShape, multiprocessors: int = MULTIPROCESSORS) -> None:
        """Compile the kernel, if CuPy has not cached it."""
        word_bytes = min(theirs.word_bytes(16), own.word_bytes(16))
        self._words = own.fragment_bytes // word_bytes
        self._theirs, self._own = theirs, own
        self._multiprocessors = multiprocessors
        assert own.fragments * self._words < 1 << 30, "a block's words are counted in 32 bits"
        options = (f"-DWORD={_WORDS[word_bytes]}", f"-DMOST_BLOCKS={MOST_BLOCKS}", f"-DTHREADS={THREADS}")
        with translated_errors():
            self._kernel = cupy.RawKernel(_SOURCE, "pull_blocks", options=options)
            self._kernel.compile()
            self._regions = [cupy.asarray(np.array(shape.regions, np.int64)) for shape in (theirs, own)]
            cupy.cuda.get_current_stream().synchronize()
        self._places = np.zeros((), _PLACES)

    def launch(self, sources: np.ndarray, targets: np.ndarray, on: Stream) -> None:
        """Enqueue the copy of blocks from slots `sources` to `targets`, integers (blocks,), at most MOST_BLOCKS."""
        blocks = len(sources)
        self._places["source"][:blocks] = sources
        self._places["to"][:blocks] = targets
        wide = -(-self._own.fragments * self._words // (4 * THREADS))
        across = min(wide, max(1, self._multiprocessors // blocks))
        grid = (across, min(blocks, max(1, self._multiprocessors // across)))
        arguments = (
            self._places,
            np.int32(blocks),
            *self._regions,
            np.uint32(self._own.fragments),
            np.int64(self._theirs.stride_bytes),
            np.int64(self._own.stride_bytes),
            np.uint32(self._words),
        )
        with on:
            self._kernel(grid, (THREADS,), arguments)
