"""A kernel that gathers a block's fragments on the device into one piece, or scatters the piece into fragments.

The piece lies on the device or in pinned host memory, and its fragments may lie apart in it. A thread reads four words
before it stores the first, because reads from host memory take microseconds.
"""

from __future__ import annotations

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.cuda import Stream, translated_errors

MOST_BLOCKS = 128
"""The most blocks of a launch. Their addresses are passed by value: 2 KiB of the 4 KiB that any device accepts."""
THREADS = 512
MULTIPROCESSORS, DIRECT_MULTIPROCESSORS = 32, 16
"""The most multiprocessors that a launch keeps busy: between memories of the device, and over the link, where it takes
as long as a copy does."""
_PLACES = np.dtype([("linear", np.int64, (MOST_BLOCKS,)), ("slot", np.int64, (MOST_BLOCKS,))])
_WORDS = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}
_SOURCE = r"""
struct Places { long long linear[MOST_BLOCKS]; long long slot[MOST_BLOCKS]; };

extern "C" __global__ void __launch_bounds__(THREADS) move_fragments(
    const __grid_constant__ Places places, const int blocks, const long long* __restrict__ regions,
    const unsigned fragments, const long long stride_bytes, const unsigned words, const unsigned pitch_words,
    const int loads)
{
    const unsigned total = fragments * words, step = gridDim.x * blockDim.x;
    for (int block = blockIdx.y; block < blocks; block += gridDim.y) {
        WORD* linear = (WORD*)places.linear[block];
        const long long offset = places.slot[block] * stride_bytes;
        for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += 4 * step) {
            WORD held[4];
            WORD* on_device[4];
            WORD* in_piece[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned at = first + i * step;
                if (at >= total) continue;
                const unsigned fragment = at / words, word = at % words;
                on_device[i] = (WORD*)(regions[fragment] + offset) + word;
                in_piece[i] = linear + (long long)fragment * pitch_words + word;
                held[i] = loads ? *in_piece[i] : *on_device[i];
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned at = first + i * step;
                if (at >= total) continue;
                if (loads) *on_device[i] = held[i]; else *in_piece[i] = held[i];
            }
        }
    }
}
"""


class FragmentKernel:
    """The compiled kernel for one shape of blocks. It belongs to one thread."""

    def __init__(
        self, shape: BlockShape, alignment: int, pitch_bytes: int = 0, multiprocessors: int = MULTIPROCESSORS
    ) -> None:
        """Compile the kernel, if CuPy has not cached it.

        `alignment`, in bytes, is that of the pieces and of `pitch_bytes`, the distance between the fragments of a
        piece; 0 if they lie back to back. A launch keeps at most `multiprocessors` of them busy.
        """
        word_bytes = shape.word_bytes(alignment)
        self._words = shape.fragment_bytes // word_bytes
        self._pitch_words = (pitch_bytes or shape.fragment_bytes) // word_bytes
        self._multiprocessors = multiprocessors
        self._shape = shape
        assert shape.fragments * self._words < 1 << 30, "a block's words are counted in 32 bits"
        options = (f"-DWORD={_WORDS[word_bytes]}", f"-DMOST_BLOCKS={MOST_BLOCKS}", f"-DTHREADS={THREADS}")
        with translated_errors():
            self._kernel = cupy.RawKernel(_SOURCE, "move_fragments", options=options)
            self._kernel.compile()  # or the first group of blocks would wait for it
            self._regions = cupy.asarray(np.array(shape.regions, np.int64))
            cupy.cuda.get_current_stream().synchronize()
        self._places = np.zeros((), _PLACES)

    def launch(self, linear: np.ndarray, slots: np.ndarray, *, loads: bool, on: Stream) -> None:
        """Enqueue the kernel on `on`; it gathers, or with `loads` scatters.

        `linear` has the addresses of the pieces and `slots` the device's slots: both int64 (blocks,), with at most
        MOST_BLOCKS blocks. Both can be overwritten when this returns.
        """
        blocks = len(slots)
        self._places["linear"][:blocks] = linear
        self._places["slot"][:blocks] = slots
        wide = -(-self._shape.fragments * self._words // (4 * THREADS))
        across = min(wide, max(1, self._multiprocessors // blocks))
        grid = (across, min(blocks, max(1, self._multiprocessors // across)))
        arguments = (
            self._places,
            np.int32(blocks),
            self._regions,
            np.uint32(self._shape.fragments),
            np.int64(self._shape.stride_bytes),
            np.uint32(self._words),
            np.uint32(self._pitch_words),
            np.int32(loads),
        )
        with on:
            self._kernel(grid, (THREADS,), arguments)
