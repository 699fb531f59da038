"""Pages of the KV cache."""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.worker.native.kv_cache import KvCache, KvPart
from services.worker.sharing.host_pages import HostPages
from shared.messages.cards import KvLayout
from tests.resource_limits import LIMIT_BYTES, small_files

LAYOUT = KvLayout("float32", layers=2, kv_heads=3, head_dim=4, block_size=8)
NARROW = msgspec.structs.replace(LAYOUT, dtype="bfloat16")


@pytest.mark.parametrize("layout", [LAYOUT, NARROW])
def test_a_block_is_one_contiguous_piece_of_its_layouts_size(layout: KvLayout) -> None:
    cache = KvCache(layout, 5)
    assert cache.pages[3].flags.c_contiguous
    assert cache.pages[3].nbytes == layout.block_bytes
    assert cache.memory.nbytes == 5 * layout.block_bytes


def test_pages_begin_on_a_page() -> None:
    for capacity_blocks in (1, 5, 10_000):
        assert KvCache(LAYOUT, capacity_blocks).pages.ctypes.data % mmap.PAGESIZE == 0


def test_unused_blocks_take_no_memory() -> None:
    before = _resident_bytes()
    cache = KvCache(LAYOUT, (1 << 30) // LAYOUT.block_bytes)
    cache.write(0, np.array([17]), np.array([0]), np.ones((1, 3, 4), np.float32), np.ones((1, 3, 4), np.float32))
    assert _resident_bytes() - before < 64 << 20


def test_without_memory_that_others_can_map_the_pages_are_ordinary_ones() -> None:
    with small_files():
        cache = KvCache(LAYOUT, 2 * LIMIT_BYTES // LAYOUT.block_bytes, shared=True)
    assert cache.exported is None
    cache.write(0, np.array([17]), np.array([0]), np.ones((1, 3, 4), np.float32), np.ones((1, 3, 4), np.float32))
    assert cache.read(0, np.array([[17]]), 1)[0].all()
    cache.drop()
    cache.close()


def test_dropped_pages_take_no_memory_and_are_used_again() -> None:
    cache = KvCache(LAYOUT, (256 << 20) // LAYOUT.block_bytes)
    cache.pages[:] = 1
    before = _resident_bytes()
    cache.drop()
    assert before - _resident_bytes() > 192 << 20
    keys = np.ones((1, 3, 4), np.float32)
    cache.write(0, np.array([17]), np.array([0]), keys, keys)
    np.testing.assert_array_equal(cache.read(0, np.array([[17]]), 2)[0][0], [np.ones((3, 4)), np.zeros((3, 4))])


def test_the_memory_view_is_that_of_the_pages() -> None:
    cache = KvCache(LAYOUT, 5)
    cache.memory[3 * LAYOUT.block_bytes : 4 * LAYOUT.block_bytes] = np.full(
        LAYOUT.block_bytes // 4, 7, np.float32
    ).data.cast("B")
    assert (cache.pages[3] == 7).all()
    assert not cache.pages[[0, 1, 2, 4]].any()


def test_a_bfloat16_cache_returns_rounded_numbers() -> None:
    cache = KvCache(NARROW, 5)
    keys = np.random.default_rng(0).normal(size=(11, 3, 4)).astype(np.float32)
    table, positions = np.array([4, 1]), np.arange(11)
    cache.write(1, table[positions // 8], positions % 8, keys, -keys)
    read_keys, read_values = cache.read(1, table[None], 11)
    assert read_keys.dtype == np.float32
    np.testing.assert_array_equal(read_keys, -read_values)
    np.testing.assert_allclose(read_keys[0], keys, rtol=2.0**-8)
    cache.write(1, table[positions // 8], positions % 8, read_keys[0], read_values[0])
    np.testing.assert_array_equal(cache.read(1, table[None], 11)[0], read_keys)


def test_keys_and_values_are_read_in_the_order_of_the_table() -> None:
    cache = KvCache(LAYOUT, 5)
    keys = np.random.default_rng(0).normal(size=(11, 3, 4)).astype(np.float32)
    table = np.array([4, 1])
    positions = np.arange(11)
    cache.write(1, table[positions // 8], positions % 8, keys, -keys)
    read_keys, read_values = cache.read(1, table[None], 11)
    np.testing.assert_array_equal(read_keys[0], keys)
    np.testing.assert_array_equal(read_values[0], -keys)
    assert not cache.pages[:, 0].any()


def test_a_block_moved_to_another_slot_is_the_same_block() -> None:
    cache = KvCache(LAYOUT, 5)
    keys = np.ones((8, 3, 4), np.float32)
    cache.write(0, np.full(8, 2), np.arange(8), keys, 2 * keys)
    cache.pages[4] = cache.pages[2]
    read_keys, read_values = cache.read(0, np.array([[4]]), 8)
    np.testing.assert_array_equal(read_keys[0], keys)
    np.testing.assert_array_equal(read_values[0], 2 * keys)


def test_parts_of_two_ranks_are_heads_of_the_same_blocks() -> None:
    pages = HostPages(5 * LAYOUT.block_bytes)
    first = KvCache(LAYOUT, 5, part=KvPart(pages, slice(0, 1), stores=True, written=None))
    second = KvCache(LAYOUT, 5, part=KvPart(pages, slice(1, 3), stores=True, written=None))
    whole = KvCache(LAYOUT, 5)
    keys = np.random.default_rng(0).normal(size=(11, 3, 4)).astype(np.float32)
    slots, offsets = np.array([4, 1])[np.arange(11) // 8], np.arange(11) % 8
    whole.write(1, slots, offsets, keys, -keys)
    first.write(1, slots, offsets, keys[:, :1], -keys[:, :1])
    second.write(1, slots, offsets, keys[:, 1:], -keys[:, 1:])
    assert first.memory == second.memory == whole.memory
    np.testing.assert_array_equal(second.read(1, np.array([[4, 1]]), 11)[0][0], keys[:, 1:])
    for cache in (first, second, whole):
        cache.close()


def test_a_part_whose_heads_another_rank_stores_only_waits_for_it() -> None:
    pages, waited = HostPages(5 * LAYOUT.block_bytes), []
    cache = KvCache(LAYOUT, 5, part=KvPart(pages, slice(0, 1), stores=False, written=lambda: waited.append(1)))
    keys = np.ones((1, 1, 4), np.float32)
    cache.write(0, np.array([1]), np.array([0]), keys, keys)
    assert not any(cache.memory)
    assert waited == [1]
    cache.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
