"""Pages of the KV cache."""

from __future__ import annotations

import numpy as np

from services.worker.native.kv_cache import KvCache
from shared.messages import KvLayout

LAYOUT = KvLayout("float32", layers=2, kv_heads=3, head_dim=4, block_size=8)


def test_a_block_is_one_contiguous_piece_of_its_layouts_size() -> None:
    cache = KvCache(np, LAYOUT, 5)
    assert cache.pages[3].flags.c_contiguous
    assert cache.pages[3].nbytes == LAYOUT.block_bytes


def test_what_is_written_is_read_in_the_order_of_the_table() -> None:
    cache = KvCache(np, LAYOUT, 5)
    keys = np.random.default_rng(0).normal(size=(11, 3, 4)).astype(np.float32)
    table = np.array([4, 1])
    positions = np.arange(11)
    cache.write(1, table[positions // 8], positions % 8, keys, -keys)
    read_keys, read_values = cache.read(1, table[None], 11)
    np.testing.assert_array_equal(read_keys[0], keys)
    np.testing.assert_array_equal(read_values[0], -keys)
    assert not cache.pages[:, 0].any()


def test_a_block_moved_to_another_slot_is_the_same_block() -> None:
    cache = KvCache(np, LAYOUT, 5)
    keys = np.ones((8, 3, 4), np.float32)
    cache.write(0, np.full(8, 2), np.arange(8), keys, 2 * keys)
    cache.pages[4] = cache.pages[2]
    read_keys, read_values = cache.read(0, np.array([[4]]), 8)
    np.testing.assert_array_equal(read_keys[0], keys)
    np.testing.assert_array_equal(read_values[0], 2 * keys)
