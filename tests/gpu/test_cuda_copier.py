"""CudaCopier over a pool whose slots CUDA will not pin, or only some; the rest of it is tested with the mover."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from services.worker.copies import Copy
from services.worker.transfer import pinned_slots
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.errors import DeviceFailed, PinRefused
from shared.pool_format import Geometry
from shared.pool_map import PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, SLOTS, CudaDevice, need_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool_directory() -> Iterator[Path]:
    """In memory: Linux pins no file of a disk's file system for as long as CUDA would."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize("refused", ["none", "all", "every second"])
def test_blocks_are_saved_and_loaded_whatever_can_be_pinned(
    refused: str, pool_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_gpu()
    from services.worker.transfer import cuda, cuda_copier

    asked = 0

    def register(address: int, size_bytes: int) -> None:
        nonlocal asked
        asked += 1
        if refused == "all" or (refused == "every second" and asked % 2):
            raise PinRefused("not this one")
        cuda.register(address, size_bytes)

    monkeypatch.setattr(cuda_copier, "register", register)
    monkeypatch.setattr(cuda_copier, "PinnedSlots", _small_chunks)
    device = CudaDevice()
    copier = device.copier
    make_pool(pool_directory / "pool", 4 << 20)
    pool = PoolMap(pool_directory / "pool")
    slots = pool.arena(Geometry.of(4 << 20).arena(0, 1, BLOCK_BYTES))
    copier.attach(slots)
    blocks = [Random(slot).randbytes(BLOCK_BYTES) for slot in range(SLOTS)]
    for slot, block in enumerate(blocks):
        device.write(slot, block)
    copier.begin([Copy(3 * slot, slot) for slot in range(SLOTS)], loads=False).wait()
    for slot, block in enumerate(blocks):
        with slots.slot(3 * slot) as memory:
            assert bytes(memory[:BLOCK_BYTES]) == block
    copier.begin([Copy(3 * slot, SLOTS - 1 - slot) for slot in range(SLOTS)], loads=True).wait()
    assert [device.read(SLOTS - 1 - slot) for slot in range(SLOTS)] == blocks
    told = copier.statistics()
    pageable = {"none": 0, "all": SLOTS, "every second": SLOTS // 2}[refused]
    assert told.saved.get("pageable", 0) == told.loaded.get("pageable", 0) == pageable
    assert sum(told.saved.values()) == sum(told.loaded.values()) == SLOTS
    assert (told.chunks_refused > 0) == (refused != "none")
    copier.close()
    slots.close()
    pool.close()
    device.memory.close()


def test_calibration_changes_no_block_and_measures_each_path() -> None:
    cupy = need_gpu()
    from services.worker.transfer.cuda_copier import CudaCopier
    from services.worker.transfer.device_memory import DeviceMemory

    before = np.random.default_rng(1).integers(0, 256, (8, 200, 4096), np.uint8)
    array: Any = cupy.asarray(before)
    memory = DeviceMemory(0)
    copier = CudaCopier(BlockShape.layer_major(array.data.ptr, 8, 4096, 200), memory, time.perf_counter)
    np.testing.assert_array_equal(array.get(), before)
    measured = copier.choice.measured
    assert {(row.path, row.loads, row.blocks) for row in measured} == {
        (path, loads, blocks)
        for path in ("rows", "batch", "staged", "zero_copy")
        for loads in (False, True)
        for blocks in (1, 8, 200)
    }
    assert all(row.took_s > 0 for row in measured)
    copier.close()
    memory.close()


class Broken:
    """A Path that no driver offers."""

    def issue(self, copies: Sequence[Copy], host: object, *, loads: bool, on: Any) -> Any:
        raise DeviceFailed("not here")


def test_a_path_that_fails_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    cupy = need_gpu()
    from services.worker.transfer.calibration import calibrate
    from services.worker.transfer.paths import Rows

    array: Any = cupy.zeros((2, 20, 4096), cupy.uint8)
    shape = BlockShape.layer_major(array.data.ptr, 2, 4096, 20)
    measured = calibrate({"broken": Broken(), "rows": Rows(shape)}, shape, time.perf_counter)
    assert {row.path for row in measured} == {"rows"}
    assert [record.message for record in caplog.records] == ["copies do not take the path broken: not here"]


def _small_chunks(
    at: int, slot_bytes: int, slots: int, register: Callable[[int, int], None], unregister: Callable[[int], None]
) -> pinned_slots.PinnedSlots:
    """Three slots a chunk, so that every block of the test lies in another."""
    return pinned_slots.PinnedSlots(at, slot_bytes, slots, register, unregister, 3 * slot_bytes)
