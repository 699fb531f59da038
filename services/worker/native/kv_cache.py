"""The paged KV cache: one array, a block's keys and values of all layers side by side.

    pages[slot]  =  layer 0: keys (block_size, kv_heads, head_dim), values (the same) | layer 1: keys, values | …

So a block leaves or enters the device as one copy. The scheduler decides which slot belongs to which sequence. A block
is zeroed when its first token is written: attention reads past a sequence's end within its last block and masks that
part, and masked numbers must be finite, whatever the slot held before.

The stored type may be narrower than float32. All attention reads stored numbers, even that of the chunk that wrote
them. So a block gives the same numbers to the worker that computed it and to one that fetched it. Widening makes a
decode step of eight sequences of 512 tokens (SmolLM2-135M) 8 % longer.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np

from services.worker.native.bfloat16 import from_bfloat16, to_bfloat16
from services.worker.native.linear import Array
from services.worker.sharing.host_pages import HostPages
from services.worker.sharing.memory import pages_to_share
from shared.messages.cards import KvLayout


@dataclass(frozen=True, slots=True)
class KvPart:
    """What one rank of a tensor-parallel group has of KV pages, which all ranks map whole (native/parallel)."""

    pages: HostPages
    heads: slice
    """The key-value heads that it computes."""
    stores: bool
    """True if this rank stores them, and not another one that has the same heads."""
    written: Callable[[], object] | None
    """Called after each `write`; it returns when the rank that stores these heads has come there. None if each rank
    has heads of its own."""


class KvCache:
    """The KV pages: `capacity_blocks` slots of `layout`. Memory is touched when a slot is first used."""

    def __init__(
        self, layout: KvLayout, capacity_blocks: int, *, shared: bool = False, part: KvPart | None = None
    ) -> None:
        """Map the pages. `layout.dtype` is float32 or bfloat16. With `shared` other processes can map them, if the
        system has such memory. With `part` they are mapped already, and only its heads are written and read."""
        self.layout = layout
        self._narrow = {"float32": False, "bfloat16": True}[layout.dtype]
        shape = (capacity_blocks, layout.layers, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        item = np.uint16 if self._narrow else np.float32
        size_bytes = prod(shape) * np.dtype(item).itemsize
        self._part = part
        self.exported = pages_to_share(lambda: HostPages(size_bytes)) if shared and part is None else None
        if part is not None:
            self.exported = part.pages
        """The memory of the pages, if other processes can map it."""
        self._mapping: mmap.mmap | None = None
        if self.exported is not None:
            self._whole: Array = self.exported.array.view(item).reshape(shape)
        else:
            self._mapping, self._whole = _zeros(shape, item)
        self.pages: Array = self._whole if part is None else self._whole[..., part.heads, :]
        """The heads of this cache, all of them but in a part."""

    @property
    def memory(self) -> memoryview:
        """All bytes of the pages, in host memory; slot i begins at i · `block_bytes`."""
        return memoryview(self._whole.reshape(-1).view(np.uint8))

    def write(self, layer: int, slots: Array, offsets: Array, keys: Array, values: Array) -> None:
        """Store new tokens' keys and values, each float32 (tokens, kv_heads, head_dim), in their blocks."""
        if self._part is None or self._part.stores:
            self._store(layer, slots, offsets, keys, values)
        if self._part is not None and self._part.written is not None:
            self._part.written()

    def _store(self, layer: int, slots: Array, offsets: Array, keys: Array, values: Array) -> None:
        if self._narrow:
            keys, values = to_bfloat16(np, keys), to_bfloat16(np, values)
        begun = slots[offsets == 0]
        if begun.size:
            self.pages[begun, layer] = 0
        self.pages[slots, layer, 0, offsets] = keys
        self.pages[slots, layer, 1, offsets] = values

    def read(self, layer: int, table: Array, length: int) -> tuple[Array, Array]:
        """Return copies of the first `length` keys and values of each sequence of `table` (sequences, blocks).

        Each is float32 (sequences, length, kv_heads, head_dim).
        """
        sequences, blocks = table.shape
        shape = (sequences, blocks * self.layout.block_size, *self.pages.shape[-2:])
        keys = self.pages[table, layer, 0].reshape(shape)
        values = self.pages[table, layer, 1].reshape(shape)
        if self._narrow:
            keys, values = from_bfloat16(keys), from_bfloat16(values)
        return keys[:, :length], values[:, :length]

    def drop(self) -> None:
        """Give the memory of all slots back to the system. What they held is lost; they can be used as before."""
        if self.exported is not None:
            self.exported.drop()
        else:
            assert self._mapping is not None
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the pages; their memory is freed when the last view of it ends."""
        self.pages = self._whole = self._mapping = None
        if self.exported is not None:
            self.exported.close()
            self.exported = None


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[mmap.mmap, Array]:
    """Return memory of its own mapping, and zeros in it, which begin on a page boundary.

    Memory of numpy.zeros begins 16 bytes after one, and a copy from there to a page can take twice as long. Blocks of
    real models are whole pages, so with this array each block begins on a page.
    """
    memory = mmap.mmap(-1, prod(shape) * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
    return memory, np.frombuffer(memory, dtype).reshape(shape)
