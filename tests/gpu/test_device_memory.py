from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.worker.transfer.devices import need_gpu

pytestmark = pytest.mark.gpu
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cupy() -> Any:
    return need_gpu()


def test_a_reserve_is_there_from_the_start_and_stays(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=256 * MIB), new_stream()
    assert memory.statistics().reserved_bytes >= 256 * MIB
    assert memory.statistics().used_bytes == 0
    address = memory.allocate(64 * MIB, on)
    assert memory.statistics().used_bytes >= 64 * MIB
    assert memory.statistics().allocations == 1
    memory.free(address)
    on.synchronize()
    assert memory.statistics().reserved_bytes >= 256 * MIB
    assert memory.statistics().used_bytes == 0
    memory.close()


def test_memory_over_the_threshold_goes_back_to_the_device(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=64 * MIB), new_stream()
    memory.free(memory.allocate(1024 * MIB, on))
    on.synchronize()
    assert memory.statistics().reserved_bytes < 1024 * MIB
    memory.close()


def test_too_much_is_refused_by_name_after_unused_memory_was_given_back(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory
    from services.worker.transfer.errors import DeviceMemoryExhausted

    memory, on = DeviceMemory(0, reserve_bytes=128 * MIB), new_stream()
    with pytest.raises(DeviceMemoryExhausted, match="bytes on a device with") as caught:
        memory.allocate(1 << 45, on)
    assert caught.value.asked_bytes == 1 << 45
    assert caught.value.reserved_bytes == 0
    assert caught.value.free_bytes > 0
    assert memory.statistics().allocations == 0
    memory.free(memory.allocate(MIB, on))  # it goes on
    on.synchronize()
    memory.close()


def test_memory_that_another_size_left_unused_makes_room_after_a_trim(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    memory, other, on = DeviceMemory(0, keep_bytes=1 << 40), DeviceMemory(0), new_stream()
    memory.free(memory.allocate(free_bytes // 2, on))
    on.synchronize()
    assert memory.statistics().reserved_bytes >= free_bytes // 2
    address = memory.allocate(free_bytes * 3 // 4, on)
    memory.free(address)
    on.synchronize()
    for pool in (memory, other):
        pool.close()


def test_a_pool_that_nothing_refers_to_gives_its_free_memory_back(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    gc.collect()
    free_bytes = cupy.cuda.runtime.memGetInfo()[0]
    memory, on = DeviceMemory(0, keep_bytes=1 << 40), new_stream()
    memory.free(memory.allocate(1024 * MIB, on))
    on.synchronize()
    assert cupy.cuda.runtime.memGetInfo()[0] <= free_bytes - 1024 * MIB
    del memory
    gc.collect()
    assert cupy.cuda.runtime.memGetInfo()[0] > free_bytes - 1024 * MIB


def test_a_raw_handle_works_like_a_stream_and_all_allocations_are_counted(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0, reserve_bytes=8 * MIB), new_stream()
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
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0), new_stream()
    with cupy.cuda.using_allocator(memory.allocator()), on:
        array = cupy.arange(1 << 20)
    del on
    gc.collect()
    del array  # freed on a stream that is gone, CUDA would crash
    assert memory.statistics().allocations == 0
    cupy.cuda.runtime.deviceSynchronize()
    memory.close()


def test_cupy_arrays_come_from_it(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory, on = DeviceMemory(0), new_stream()
    with cupy.cuda.using_allocator(memory.allocator()), on:
        array = cupy.arange(1 << 20)
        assert int(array.sum()) == (1 << 20) * ((1 << 20) - 1) // 2
        assert memory.statistics().allocations == 1
        del array
    on.synchronize()
    assert memory.statistics().allocations == 0
    memory.close()


GARBAGE = (
    "arrays_in_a_cycle",
    "arrays_in_a_cycle_with_their_stream",
    "a_memory_in_a_cycle_with_its_arrays",
    "an_exception_that_its_own_frame_holds",
    "an_array_that_there_is_no_room_for",
    "another_thread_collects",
    "views_outlive_their_array",
    "arrays_at_the_end_of_the_process",
)


@pytest.mark.parametrize("case", GARBAGE)
def test_the_collector_frees_arrays_in_garbage_and_the_process_lives(cupy: Any, case: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.gpu.garbage", case]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    left = "1" if case == "arrays_at_the_end_of_the_process" else "0"
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, left, "")


def test_every_kind_of_garbage_has_a_test(cupy: Any) -> None:
    from tests.gpu.garbage import CASES

    assert tuple(CASES) == GARBAGE


def test_threads_allocate_free_and_read_statistics_at_once(cupy: Any) -> None:
    from services.worker.transfer.cuda import new_stream
    from services.worker.transfer.device_memory import DeviceMemory

    memory = DeviceMemory(0, reserve_bytes=64 * MIB, keep_bytes=1 << 40)
    before = memory.statistics().allocated
    allocator = memory.allocator()
    rounds, threads = 40, 8
    wrong: list[str] = []
    with cupy.cuda.using_allocator(allocator):
        int(cupy.full(1024, 1, cupy.int32).sum())  # or each thread would compile these kernels

    def allocate_and_free(number: int) -> None:
        own = new_stream()
        for turn in range(rounds):
            address = memory.allocate(4096 * (1 + (number + turn) % 9), own)
            cupy.cuda.runtime.memsetAsync(address, number, 4096, own.ptr)
            memory.free(address)
        own.synchronize()

    def make_arrays_and_garbage(number: int) -> None:
        with cupy.cuda.using_allocator(allocator), new_stream() as own:
            for turn in range(rounds):
                array = cupy.full(1024, number, cupy.int32)
                cycle: list[Any] = [cupy.full(512, turn, cupy.int32)]
                cycle.append(cycle)
                if int(array.sum()) != 1024 * number:
                    wrong.append(f"thread {number}, round {turn}")
            own.synchronize()

    def read_statistics(number: int) -> None:
        for _ in range(rounds):
            told = memory.statistics()
            if not 0 <= told.allocations <= told.allocated:
                wrong.append(str(told))

    was = gc.get_threshold()
    gc.set_threshold(5)  # the collector frees arrays at many lines, of threads that hold the lock too
    try:
        with ThreadPoolExecutor(3 * threads) as pool:
            kinds = (allocate_and_free, make_arrays_and_garbage, read_statistics)
            running = [pool.submit(kind, number) for number in range(threads) for kind in kinds]
            for ended in running:
                ended.result()
    finally:
        gc.set_threshold(*was)
    gc.collect()
    assert not wrong
    told = memory.statistics()
    # Full and sum make an array or more each; and each thread's two a round are there at the least.
    assert told.allocated - before >= threads * rounds * 3
    assert told.allocations == 0
    cupy.cuda.runtime.deviceSynchronize()
    memory.close()


def test_memory_of_one_gpu_is_freed_by_a_thread_that_uses_another(cupy: Any) -> None:
    from services.worker.transfer.device_memory import DeviceMemory

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    with cupy.cuda.Device(1):
        memory, on = DeviceMemory(1), cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.using_allocator(memory.allocator()), on:
            cycle: list[Any] = [cupy.zeros(MIB)]
            cycle.append(cycle)
    del cycle
    collecting = threading.Thread(target=gc.collect)  # whose current device is 0
    collecting.start()
    collecting.join()
    on.synchronize()
    assert (memory.statistics().allocations, memory.statistics().used_bytes) == (0, 0)
    memory.close()
