from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.worker.transfer.devices import need_gpu

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def cupy() -> Any:
    return need_gpu()


def test_a_reserve_is_there_from_the_start_and_stays(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=256 * MIB), stream()
    assert memory.statistics().reserved_bytes >= 256 * MIB
    assert memory.statistics().used_bytes == 0
    address = memory.allocate(64 * MIB, on)
    assert memory.statistics().reserved_bytes == memory.statistics().most_reserved_bytes
    assert memory.statistics().used_bytes >= 64 * MIB
    assert memory.statistics().allocations == 1
    memory.free(address)
    on.synchronize()
    assert memory.statistics().reserved_bytes >= 256 * MIB
    assert memory.statistics().used_bytes == 0
    memory.close()


def test_what_is_over_the_threshold_goes_back_to_the_device(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=64 * MIB), stream()
    memory.free(memory.allocate(1024 * MIB, on))
    on.synchronize()
    assert memory.statistics().most_reserved_bytes >= 1024 * MIB
    assert memory.statistics().reserved_bytes < 1024 * MIB
    memory.close()


def test_too_much_is_refused_by_name_after_unused_memory_was_given_back(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory
    from services.worker.transfer.errors import DeviceMemoryExhausted

    memory, on = DeviceMemory(0, reserve_bytes=128 * MIB), stream()
    with pytest.raises(DeviceMemoryExhausted, match="bytes asked of a device with") as caught:
        memory.allocate(1 << 45, on)
    assert caught.value.asked_bytes == 1 << 45
    assert caught.value.reserved_bytes == 0
    assert caught.value.free_bytes > 0
    told = memory.statistics()
    assert (told.trims, told.refused, told.allocations) == (1, 1, 0)
    memory.free(memory.allocate(MIB, on))  # it goes on
    on.synchronize()
    memory.close()


def test_memory_that_another_size_left_unused_makes_room_after_a_trim(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    memory, other, on = DeviceMemory(0, keep_bytes=1 << 40), DeviceMemory(0), stream()
    memory.free(memory.allocate(free_bytes // 2, on))
    on.synchronize()
    assert memory.statistics().reserved_bytes >= free_bytes // 2
    address = memory.allocate(free_bytes * 3 // 4, on)
    assert memory.statistics().refused == 0
    memory.free(address)
    on.synchronize()
    for pool in (memory, other):
        pool.close()


def test_a_raw_handle_does_as_a_stream_and_all_allocations_are_counted(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=8 * MIB), stream()
    before = memory.statistics().allocated
    for handle in (on, on.ptr, 0):
        address = memory.allocate(MIB, handle)
        cupy.cuda.runtime.memsetAsync(address, 1, MIB, on.ptr)
        on.synchronize()
        memory.free(address)
    on.synchronize()
    cupy.cuda.runtime.streamSynchronize(0)
    told = memory.statistics()
    assert (told.allocated, told.allocations) == (before + 3, 0)
    memory.close()


def test_a_stream_outlives_the_arrays_that_were_made_for_it(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0), stream()
    with cupy.cuda.using_allocator(memory.allocator()), on:
        array = cupy.arange(1 << 20)
    del on
    gc.collect()
    del array  # freed on a stream that is gone, CUDA would crash
    assert memory.statistics().allocations == 0
    cupy.cuda.runtime.deviceSynchronize()
    memory.close()


def test_cupy_arrays_come_from_it(cupy: Any) -> None:
    from services.worker.transfer.cuda import stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0), stream()
    with cupy.cuda.using_allocator(memory.allocator()), on:
        array = cupy.arange(1 << 20)
        assert int(array.sum()) == (1 << 20) * ((1 << 20) - 1) // 2
        assert memory.statistics().allocations == 1
        del array
    on.synchronize()
    assert memory.statistics().allocations == 0
    memory.close()
