"""Every path between scattered blocks on a GPU and slots in host memory gives the bytes that NumPy gives."""

from __future__ import annotations

import mmap
from math import gcd
from typing import Any

import numpy as np
import pytest

from services.worker.contracts.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from tests.worker.transfer.devices import need_gpu
from tests.worker.transfer.layer_major import layer_major

pytestmark = pytest.mark.gpu
POOL_SLOTS = 300
SHAPES = {  # fragments, bytes of each, slots
    "one fragment": (1, 20480, 40),
    "wide words": (6, 832, 40),
    "words of 4": (5, 836, 40),
    "single bytes": (3, 833, 40),
    "a segment in pieces": (8, 131072, 12),
    "larger than a segment": (96, 196608, 3),
}
PATHS = ("rows", "batch", "staged", "staged, one by one")


def assert_same(found: Any, expected: Any) -> None:
    """Assert that arrays are equal. NumPy's own assertion says where they differ, and takes 20 times as long."""
    if not np.array_equal(found, expected):
        np.testing.assert_array_equal(found, expected)


class PathRig:
    """Device memory and a pool, with a copy of each in NumPy, which indexing copies in the same way."""

    def __init__(self, cupy: Any, shape: tuple[int, int, int], *, pinned: bool = True, uneven: bool = False) -> None:
        from services.worker.transfer import memcpy_batch, paths
        from services.worker.transfer.cuda import new_stream, register
        from services.worker.transfer.device_memory import DeviceMemory
        from services.worker.transfer.fragment_kernel import FragmentKernel
        from services.worker.transfer.staging_ring import StagingRing

        self.cupy = cupy
        fragments, fragment_bytes, self.slots = shape
        draw = np.random.default_rng(len(str(shape)))
        self.blocks = draw.integers(0, 256, (fragments, self.slots, fragment_bytes), np.uint8)
        self.device = cupy.asarray(self.blocks)
        self.shape = layer_major(self.device.data.ptr, fragments, fragment_bytes, self.slots)
        self.order = list(range(fragments))
        if uneven:
            self.order = [*self.order[1::2], *self.order[::2]]
            regions = tuple(self.shape.regions[index] for index in self.order)
            self.shape = BlockShape(regions, fragment_bytes, fragment_bytes, self.slots)
            assert self.shape.pitch_bytes is None
        slot_bytes = -(-self.shape.block_bytes // 4096) * 4096
        self.pool_slots = min(POOL_SLOTS, (80 << 20) // slot_bytes)
        self.memory = mmap.mmap(-1, self.pool_slots * slot_bytes)
        self.pool = np.frombuffer(self.memory, np.uint8).reshape(self.pool_slots, slot_bytes)
        self.pool[:] = draw.integers(0, 256, self.pool.shape, np.uint8)
        self.expected_pool = self.pool.copy()
        self.array = paths.SlotArray(self.pool.ctypes.data, slot_bytes)
        self.pinned = pinned
        if pinned:
            register(self.array.at, self.pool.nbytes)
        self.on = new_stream()
        self.device_memory = DeviceMemory(0)
        self.ring = StagingRing(self.device_memory, self.shape.block_bytes)
        kernel = FragmentKernel(self.shape, 1 if fragment_bytes % 4 else 4096)
        memcpy = memcpy_batch.load_memcpy_batch()
        assert memcpy is not None
        self.paths: dict[str, paths.TransferPath] = {
            "rows": paths.RowsPath(self.shape),
            "batch": paths.BatchPath(self.shape, memcpy),
            "staged": paths.StagedPath(self.shape, kernel, self.ring, memcpy),
            "staged, one by one": paths.StagedPath(self.shape, kernel, self.ring, None),
        }
        cupy.cuda.get_current_stream().synchronize()

    def copy(self, path: str, copies: list[Copy], *, loads: bool) -> None:
        self.paths[path].issue(copies, self.array, loads=loads, on=self.on).synchronize()
        used = self.shape.block_bytes
        for copy in copies:
            ours = self.blocks[self.order, copy.device_slot]
            if loads:
                self.blocks[self.order, copy.device_slot] = self.expected_pool[copy.pool_slot, :used].reshape(
                    ours.shape
                )
            else:
                self.expected_pool[copy.pool_slot, :used] = ours.reshape(-1)

    def check(self) -> None:
        """Compare all of both memories, including the bytes that no copy may touch."""
        assert_same(self.pool, self.expected_pool)
        assert_same(self.device.get(), self.blocks)

    def close(self) -> None:
        from services.worker.transfer.cuda import unregister

        self.on.synchronize()
        if self.pinned:
            unregister(self.pool.ctypes.data)
        self.ring.close()
        self.device_memory.close()


@pytest.fixture
def cupy() -> Any:
    return need_gpu()


@pytest.mark.parametrize("path", ["direct", "rows", "batch"])
@pytest.mark.parametrize("row_bytes", [20, 1024, 833])
def test_parts_of_blocks_are_copied_exactly_and_nothing_between_them_changes(
    cupy: Any, path: str, row_bytes: int
) -> None:
    """A rank's rows lie among those of another in the pool's slots."""
    from services.worker.transfer import memcpy_batch, paths
    from services.worker.transfer.cuda import new_stream, register, unregister
    from services.worker.transfer.fragment_kernel import FragmentKernel

    rows, slots, count = 96, 150, 140
    draw = np.random.default_rng(row_bytes)
    blocks = draw.integers(0, 256, (slots, rows, row_bytes), np.uint8)
    on_device = cupy.asarray(blocks)
    shape = BlockShape.of_heads(on_device.data.ptr, rows, row_bytes, slots)
    slot_bytes = -(-2 * rows * row_bytes // 4096) * 4096
    pool = np.frombuffer(mmap.mmap(-1, POOL_SLOTS * slot_bytes), np.uint8)
    pool[:] = draw.integers(0, 256, pool.shape, np.uint8)
    expected = pool.copy()
    whole = expected.reshape(POOL_SLOTS, slot_bytes)[:, : 2 * rows * row_bytes].reshape(POOL_SLOTS, rows, 2, row_bytes)
    memcpy = memcpy_batch.load_memcpy_batch()
    assert memcpy is not None
    aligned = gcd(4096, row_bytes)  # words of 4, 16 and 1 bytes
    all_paths: dict[str, paths.TransferPath] = {
        "direct": paths.DirectPath(FragmentKernel(shape, aligned, 2 * row_bytes)),
        "rows": paths.RowsPath(shape),
        "batch": paths.BatchPath(shape, memcpy),
    }
    register(pool.ctypes.data, pool.nbytes)
    stream = new_stream()
    cupy.cuda.get_current_stream().synchronize()
    for loads in (False, True):
        here, there = draw.permutation(slots)[:count].tolist(), draw.permutation(POOL_SLOTS)[:count].tolist()
        copies = [Copy(pool_slot, slot) for pool_slot, slot in zip(there, here, strict=True)]
        array = paths.SlotArray(pool.ctypes.data + row_bytes, slot_bytes, 2 * row_bytes)
        all_paths[path].issue(copies, array, loads=loads, on=stream).synchronize()
        if loads:
            blocks[here] = whole[there, :, 1]
        else:
            whole[there, :, 1] = blocks[here]
        assert_same(pool, expected)
        assert_same(on_device.get(), blocks)
    unregister(pool.ctypes.data)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_scattered_blocks_are_copied_exactly_and_nothing_else_changes(cupy: Any, shape: str, path: str) -> None:
    rig = PathRig(cupy, SHAPES[shape])
    draw = np.random.default_rng(7)
    for count in (1, 2, rig.slots):
        for loads in (False, True):
            device = draw.permutation(rig.slots)[:count].tolist()
            pool = draw.permutation(rig.pool_slots)[: len(device)].tolist()
            copies = [Copy(there, here) for there, here in zip(pool, device, strict=False)]
            rig.copy(path, copies, loads=loads)
            rig.check()
    rig.close()


@pytest.mark.parametrize("path", PATHS)
def test_unevenly_spaced_fragments_are_copied_exactly(cupy: Any, path: str) -> None:
    rig = PathRig(cupy, SHAPES["wide words"], uneven=True)
    rig.copy(path, [Copy(3, 30), Copy(2, 31), Copy(290, 4)], loads=False)
    rig.copy(path, [Copy(7, 30), Copy(2, 5)], loads=True)
    rig.check()
    rig.close()


@pytest.mark.parametrize("path", PATHS)
def test_more_blocks_than_a_launch_or_the_ring_holds_are_copied_exactly(cupy: Any, path: str) -> None:
    rig = PathRig(cupy, (4, 16384, 1024))
    copies = [Copy(299 - index, (index * 37) % 1024) for index in range(300)]
    rig.copy(path, copies, loads=False)
    rig.check()
    rig.copy(path, copies[::-1], loads=True)
    rig.copy(path, [Copy(copy.pool_slot, 1023 - copy.device_slot) for copy in copies], loads=True)
    rig.check()
    rig.close()


@pytest.mark.parametrize("uneven", [False, True])
def test_rows_copy_memory_that_is_not_pinned(cupy: Any, uneven: bool) -> None:
    rig = PathRig(cupy, SHAPES["wide words"], pinned=False, uneven=uneven)
    rig.copy("rows", [Copy(3, 30), Copy(2, 31)], loads=False)
    rig.copy("rows", [Copy(9, 30), Copy(8, 1)], loads=True)
    rig.check()
    rig.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", ["wide words", "single bytes"])
def test_blocks_go_between_two_layouts_on_the_device(cupy: Any, shape: str, path: str) -> None:
    """Blocks go from one tensor a layer to super-blocks, and back to other places."""
    rig = PathRig(cupy, SHAPES[shape])
    super_blocks = cupy.asarray(rig.pool)
    cupy.cuda.get_current_stream().synchronize()
    rig.array = type(rig.array)(super_blocks.data.ptr, rig.array.slot_bytes)
    draw = np.random.default_rng(9)
    for loads in (False, True, False):
        slots = draw.permutation(rig.slots)[:30].tolist()
        rig.copy(path, [Copy(int(draw.integers(0, 9)) * 30 + n, slot) for n, slot in enumerate(slots)], loads=loads)
    assert_same(super_blocks.get(), rig.expected_pool)
    assert_same(rig.device.get(), rig.blocks)
    rig.close()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_blocks_checksum_on_the_device_is_numpys(cupy: Any, shape: str, uneven: bool) -> None:
    from services.worker.transfer.block_checksum import block_checksum
    from services.worker.transfer.checksum_kernel import ChecksumKernel

    rig = PathRig(cupy, SHAPES[shape], uneven=uneven and SHAPES[shape][0] > 2)
    slots = list(range(rig.slots))[::-1] * (200 // rig.slots if rig.slots > 3 else 1)  # more than a launch takes
    blocks = [rig.blocks[rig.order, slot].tobytes() for slot in range(rig.slots)]
    expected = [block_checksum(memoryview(block)) for block in blocks]
    assert ChecksumKernel(rig.shape).checksums(slots, rig.on) == [expected[slot] for slot in slots]
    rig.close()
