"""Tests of CudaCopier: which path blocks take, and what happens if one fails; each test compares bytes.

As memory that CUDA refuses to pin, they use memory that the test has pinned before.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from services.worker.config import CopyPath
from services.worker.contracts.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from services.worker.transfer.path_choice import MANY_BLOCKS, MOST_IN_A_ROW, path_order
from shared.errors import ConfigError
from shared.pool.format import PoolGeometry
from shared.pool.map import ArenaMap, PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, FRAGMENTS, SLOTS, CudaDevice, need_gpu
from tests.worker.transfer.layer_major import layer_major

pytestmark = pytest.mark.gpu
ARENA = PoolGeometry.of(4 << 20).arena(0, 1, BLOCK_BYTES)
FORCED: tuple[CopyPath, ...] = ("rows", "batch", "staged")
LIMIT_S = 180.0


class CopierRig:
    """Every slot of a device, and a pool, in chunks of three slots; filled with random bytes."""

    def __init__(self, slots: ArenaMap, path: CopyPath) -> None:
        self.device = CudaDevice(path, chunk_bytes=3 * ARENA.slot_bytes)
        self.slots = slots
        self.copier = self.device.copier
        self.copier.attach(slots)
        self.draw = Random(5)
        self.blocks = [self.draw.randbytes(BLOCK_BYTES) for _ in range(SLOTS)]
        for slot, block in enumerate(self.blocks):
            self.device.write(slot, block)

    def there_and_back(self, places: Sequence[int]) -> list[Any]:
        """Save each device slot to its place in the pool and load it into another; return both Pendings."""
        for place in places:
            with self.slots.slot(place) as memory:
                memory[:] = bytes(len(memory))
        saves = self.copier.begin([Copy(place, slot) for slot, place in enumerate(places)], loads=False)
        saves.wait()
        for slot, place in enumerate(places):
            with self.slots.slot(place) as memory:
                assert bytes(memory[:BLOCK_BYTES]) == self.blocks[slot]
                assert not any(memory[BLOCK_BYTES:])
        loads = self.copier.begin([Copy(place, SLOTS - 1 - slot) for slot, place in enumerate(places)], loads=True)
        loads.wait()
        self.blocks[SLOTS - len(places) :] = self.blocks[: len(places)][::-1]
        assert [self.device.read(slot) for slot in range(SLOTS)] == self.blocks
        return [saves, loads]

    def close(self) -> None:
        self.copier.close()
        self.device.memory.close()


@contextmanager
def opened(path: CopyPath = "rows") -> Iterator[CopierRig]:
    need_gpu()
    # In memory: Linux pins no file of a disk's file system for as long as CUDA would.
    with TemporaryDirectory(dir="/dev/shm") as directory:
        make_pool(Path(directory) / "pool", 4 << 20)
        pool = PoolMap(Path(directory) / "pool")
        slots = pool.arena(ARENA)
        rig = CopierRig(slots, path)
        yield rig
        rig.close()
        slots.close()
        pool.close()


@pytest.mark.parametrize("refused", ["none", "all", "every second"])
def test_blocks_are_saved_and_loaded_whatever_can_be_pinned(refused: str, caplog: pytest.LogCaptureFixture) -> None:
    need_gpu()
    from services.worker.transfer.cuda import register, unregister

    with opened() as rig:
        at = np.frombuffer(rig.slots.bytes, np.uint8).ctypes.data
        chunk_bytes = 3 * ARENA.slot_bytes
        taken = {"none": [], "all": range(SLOTS), "every second": range(0, SLOTS, 2)}[refused]
        for chunk in taken:
            register(at + chunk * chunk_bytes, chunk_bytes)
        with caplog.at_level(logging.WARNING):
            told = rig.there_and_back([3 * slot for slot in range(SLOTS)])
        pageable = {"none": 0, "all": SLOTS, "every second": SLOTS // 2}[refused]
        paths = {path: blocks for path, blocks in (("rows", SLOTS - pageable), ("pageable", pageable)) if blocks}
        assert [pending.paths for pending in told] == [paths, paths]
        assert len(caplog.records) == (pageable > 0)
        rig.copier.detach()
        for chunk in taken:
            unregister(at + chunk * chunk_bytes)


@pytest.mark.parametrize("path", FORCED)
def test_a_group_across_pinned_chunks_is_copied_on_every_path(path: CopyPath) -> None:
    with opened(path) as rig:
        for pending in rig.there_and_back(range(7, 7 + SLOTS)):
            assert (pending.paths, pending.fallbacks) == ({path: SLOTS}, {})


def test_a_path_that_does_not_exist_for_these_blocks_is_refused_with_a_list_of_paths() -> None:
    cupy = need_gpu()
    from services.worker.transfer.cuda_copier import CudaCopier
    from services.worker.transfer.device_memory import DeviceMemory

    array: Any = cupy.zeros((20, 4096), cupy.uint8)
    memory = DeviceMemory(0)
    shape = BlockShape.contiguous(array.data.ptr, 4096, 20)
    with pytest.raises(ConfigError, match=r"copy_path is staged, .* one of: auto, rows, batch$"):
        CudaCopier(shape, memory, time.perf_counter, path="staged")
    memory.close()


@pytest.mark.parametrize(("blocks", "path"), [(MANY_BLOCKS - 1, "rows"), (MANY_BLOCKS, "staged")])
def test_without_a_setting_the_number_of_blocks_decides_the_path(blocks: int, path: str) -> None:
    with opened("auto") as rig:
        for pending in rig.there_and_back(range(blocks)):
            assert (pending.paths, pending.fallbacks) == ({path: blocks}, {})


class Broken:
    """A TransferPath that issues the first half of the copies and then fails as CUDA does."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.works = False

    def issue(self, copies: Sequence[Copy], pool: Any, *, loads: bool, on: Any) -> Any:
        from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

        last = self.path.issue(copies if self.works else copies[: len(copies) // 2], pool, loads=loads, on=on)
        if not self.works:
            runtime.memcpyAsync(pool.at, pool.at, 1, 77, on.ptr)
        return last


INVALID = "cudaErrorInvalidMemcpyDirection"


@pytest.mark.parametrize("path", FORCED)
def test_blocks_of_a_failing_path_take_the_next_one_and_the_path_is_left_out_in_the_end(
    path: CopyPath, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path) as rig:
        for direction in rig.copier.directions.values():
            direction.paths[path] = Broken(direction.paths[path])
        following = path_order(SLOTS, FORCED, fragments=FRAGMENTS, forced=path)[1]
        for turn in range(MOST_IN_A_ROW + 2):
            fell = {f"{path}: {INVALID}": SLOTS} if turn < MOST_IN_A_ROW else {}
            for pending in rig.there_and_back(rig.draw.sample(range(ARENA.slots), SLOTS)):
                assert (pending.paths, pending.fallbacks) == ({following: SLOTS}, fell)
        told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 2, "once a direction"
        assert all(
            message.startswith(f"the copy path {path} keeps failing and is not used any more") for message in told
        )


def test_where_no_path_works_it_is_an_error_and_the_copier_goes_on_when_one_does() -> None:
    with opened() as rig:
        last = []
        for direction in rig.copier.directions.values():
            direction.paths |= {name: Broken(path) for name, path in direction.paths.items()}
            broken = Broken(direction.pageable)
            last.append(broken)
            direction.pageable = broken
        for _ in range(2 * MOST_IN_A_ROW):
            for loads in (False, True):
                with pytest.raises(DeviceFailed, match=INVALID):
                    rig.copier.begin([Copy(slot, slot) for slot in range(SLOTS)], loads=loads)
        for broken in last:
            broken.works = True
        for slot, block in enumerate(rig.blocks):  # of the loads some half went out
            rig.device.write(slot, block)
        for pending in rig.there_and_back(range(SLOTS)):
            assert pending.paths == {"pageable": SLOTS}


def test_each_differing_copy_is_found() -> None:
    with opened() as rig:
        rig.there_and_back(range(SLOTS))
        copies = [Copy(place, SLOTS - 1 - place) for place in range(SLOTS)]
        assert rig.copier.differs(copies) == [False] * SLOTS
        rig.device.write(SLOTS - 1 - 3, rig.blocks[SLOTS - 1 - 3][:-1] + b"?")
        with rig.slots.slot(5) as memory:
            memory[0] ^= 1
            memory[BLOCK_BYTES] ^= 1
        with rig.slots.slot(6) as memory:
            memory[BLOCK_BYTES] ^= 1  # behind the block
        assert [place for place, differs in enumerate(rig.copier.differs(copies)) if differs] == [3, 5]


@pytest.mark.parametrize("left_mib", [32, 72])
def test_without_room_for_both_staging_rings_the_staged_path_is_left_out(
    left_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    cupy = need_gpu()
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.cuda_copier import CudaCopier
    from services.worker.transfer.device_memory import DeviceMemory

    before = np.random.default_rng(1).integers(0, 256, (8, 200, 4096), np.uint8)
    array: Any = cupy.asarray(before)
    shape = layer_major(array.data.ptr, 8, 4096, 200)
    memory = DeviceMemory(0)
    CudaCopier(shape, memory, time.perf_counter, path="rows").close()  # kernels are loaded
    hog, on = DeviceMemory(0), new_stream()
    held: list[int] = []
    room = cupy.cuda.runtime.memGetInfo()[0] - (left_mib << 20)
    while room >= 2 << 20:
        try:
            held.append(hog.allocate(room, on))
        except DeviceMemoryExhausted:
            room //= 2
        room = min(room, cupy.cuda.runtime.memGetInfo()[0] - (left_mib << 20))
    copier = CudaCopier(shape, memory, time.perf_counter)
    assert any("has no room" in record.message for record in caplog.records)
    np.testing.assert_array_equal(array.get(), before)
    with pytest.raises(ConfigError, match=r"one of: auto, rows, batch$"):
        CudaCopier(shape, memory, time.perf_counter, path="staged")
    copier.close()
    for address in held:
        hog.free(address)
    on.synchronize()
    CudaCopier(shape, memory, time.perf_counter, path="staged").close()
    hog.close()
    memory.close()


LOST = """
import cupy, time
from services.worker.contracts.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda_copier import Direction, InFlight
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.paths import SlotArray

class Wild:
    kernel = cupy.RawKernel('extern "C" __global__ void wild(int* at) { *at = 1; }', "wild")
    def issue(self, copies, pool, *, loads, on):
        with on:
            self.kernel((1,), (1,), (cupy.uintp(16),))
        return on

array = cupy.zeros((20, 4096), cupy.uint8)
pool = cupy.cuda.alloc_pinned_memory(20 * 4096)
direction = Direction(BlockShape.contiguous(array.data.ptr, 4096, 20), DeviceMemory(0))
direction.paths["wild"] = Wild()
flight = InFlight()
for order in (("wild", "rows", "pageable"), ("rows", "pageable"), ("batch", "rows", "pageable")):
    try:
        direction.hand_over([Copy(1, 1)], SlotArray(pool.ptr, 4096), order, flight, loads=False)
        flight.wait()
    except DeviceFailed as wrong:
        print(wrong.reason, dict(flight.fallbacks), flush=True)
import os
os._exit(0)  # nothing of CUDA's ends well any more
"""


def test_a_lost_device_stays_an_error_and_falls_back_to_nothing() -> None:
    need_gpu()
    ended = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.stdout.splitlines() == ["cudaErrorIllegalAddress {}"] * 3, ended.stderr
