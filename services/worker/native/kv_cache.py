"""The paged KV cache: one array, a block's keys and values of all layers side by side.

    pages[slot]  =  layer 0: keys (block_size, kv_heads, head_dim), values (the same) | layer 1: keys, values | …

so that a block leaves or enters the device as one copy. Which slot belongs to which sequence is the scheduler's
business. Pages start as zeros: attention reads past a sequence's end within its last block and masks it, and what it
masks must at least be a number.
"""

from __future__ import annotations

from types import ModuleType

from services.worker.native.linear import Array
from shared.messages import KvLayout


class KvCache:
    """`capacity_blocks` slots of `layout`; memory is touched as slots are first used."""

    def __init__(self, xp: ModuleType, layout: KvLayout, capacity_blocks: int) -> None:
        self.layout = layout
        self.capacity_blocks = capacity_blocks
        self.pages: Array = xp.zeros(
            (capacity_blocks, layout.layers, 2, layout.block_size, layout.kv_heads, layout.head_dim), layout.dtype
        )

    def write(self, layer: int, slots: Array, offsets: Array, keys: Array, values: Array) -> None:
        """Store new tokens' keys and values, each (tokens, kv_heads, head_dim), at their places in their blocks."""
        self.pages[slots, layer, 0, offsets] = keys
        self.pages[slots, layer, 1, offsets] = values

    def read(self, layer: int, table: Array, length: int) -> tuple[Array, Array]:
        """Copies of the first `length` keys and values of each sequence of `table` (sequences, blocks).

        Each is (sequences, length, kv_heads, head_dim).
        """
        sequences, blocks = table.shape
        shape = (sequences, blocks * self.layout.block_size, self.layout.kv_heads, self.layout.head_dim)
        keys = self.pages[table, layer, 0].reshape(shape)
        values = self.pages[table, layer, 1].reshape(shape)
        return keys[:, :length], values[:, :length]
