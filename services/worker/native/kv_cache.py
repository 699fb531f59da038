"""The paged KV cache: one array, a block's keys and values of all layers side by side.

    pages[slot]  =  layer 0: keys (block_size, kv_heads, head_dim), values (the same) | layer 1: keys, values | …

so that a block leaves or enters the device as one copy. Which slot belongs to which sequence is the scheduler's
business. The rest of a block is zeros from its first token on: attention reads past a sequence's end within its last
block and masks it, and what it masks must at least be finite, whatever the slot held for others before.

What is stored may be narrower than float32. All attention reads what is stored, also that of the chunk that wrote it:
so a block gives the same numbers to those who computed it and to those who were given it. Widening what is read makes
a decode step of eight sequences of 512 tokens (SmolLM2-135M) 8 % longer.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from math import prod

import numpy as np

from services.worker.native.bfloat16 import from_bfloat16, to_bfloat16
from services.worker.native.linear import Array
from shared.messages import KvLayout


class KvCache:
    """`capacity_blocks` slots of `layout`; memory is touched as slots are first used."""

    def __init__(self, layout: KvLayout, capacity_blocks: int) -> None:
        """Of `layout.dtype` there are float32 and bfloat16."""
        self.layout = layout
        self.capacity_blocks = capacity_blocks
        self._narrow = {"float32": False, "bfloat16": True}[layout.dtype]
        shape = (capacity_blocks, layout.layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        self.pages: Array = _zeros(shape, np.uint16 if self._narrow else np.float32)

    @property
    def memory(self) -> memoryview:
        """All of the pages' bytes, in host memory; slot i from i · `block_bytes` on."""
        return memoryview(self.pages.reshape(-1).view(np.uint8))

    def write(self, layer: int, slots: Array, offsets: Array, keys: Array, values: Array) -> None:
        """Store new tokens' keys and values, each float32 (tokens, kv_heads, head_dim), at their places in their
        blocks."""
        if self._narrow:
            keys, values = to_bfloat16(np, keys), to_bfloat16(np, values)
        begun = slots[offsets == 0]
        if begun.size:
            self.pages[begun, layer] = 0
        self.pages[slots, layer, 0, offsets] = keys
        self.pages[slots, layer, 1, offsets] = values

    def read(self, layer: int, table: Array, length: int) -> tuple[Array, Array]:
        """Copies of the first `length` keys and values of each sequence of `table` (sequences, blocks).

        Each is float32 (sequences, length, kv_heads, head_dim).
        """
        sequences, blocks = table.shape
        shape = (sequences, blocks * self.layout.block_size, self.layout.kv_heads, self.layout.head_dim)
        keys = self.pages[table, layer, 0].reshape(shape)
        values = self.pages[table, layer, 1].reshape(shape)
        if self._narrow:
            keys, values = from_bfloat16(keys), from_bfloat16(values)
        return keys[:, :length], values[:, :length]

    def close(self) -> None:
        """The memory goes when nobody has a view of it any more."""
        self.pages = None


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """Like numpy.zeros, which lies 16 bytes off a page, where a copy to a page can take twice as long. Blocks as models
    have them are whole pages, so all of them begin on one."""
    memory = mmap.mmap(-1, prod(shape) * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
    return np.frombuffer(memory, dtype).reshape(shape)
