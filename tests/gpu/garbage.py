"""Arrays of a DeviceMemory that end as garbage, each case in a process of its own, because it may crash.

It is started as `python -m tests.gpu.garbage CASE` and prints how many allocations are left.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import new_stream
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.errors import DeviceMemoryExhausted

SIZE = 1 << 20


class Cycle:
    """An object in a cycle, which only the collector frees after its last name is gone."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.itself = self


def _arrays_in_a_cycle(memory: DeviceMemory) -> None:
    with cp.cuda.using_allocator(memory.allocator()), new_stream():
        Cycle(cp.zeros(SIZE), cp.zeros(SIZE))


def _arrays_in_a_cycle_with_their_stream(memory: DeviceMemory) -> None:
    with cp.cuda.using_allocator(memory.allocator()):
        on = new_stream()
        with on:
            Cycle(on, cp.zeros(SIZE), cp.zeros(SIZE))
            Cycle(cp.zeros(SIZE), on)


def _a_memory_in_a_cycle_with_its_arrays(memory: DeviceMemory) -> None:
    for _ in range(20):
        own, on = DeviceMemory(memory.device), new_stream()
        allocator = own.allocator()
        with cp.cuda.using_allocator(allocator), on:
            Cycle(on, own, allocator, cp.zeros(SIZE), cp.zeros(SIZE))
            Cycle(cp.zeros(SIZE), allocator, own, on)
        del own, on, allocator
        gc.collect()


def _an_exception_that_its_own_frame_holds(memory: DeviceMemory) -> None:
    def fail() -> None:
        array = cp.zeros(SIZE)
        try:
            raise ValueError(array.nbytes)
        except ValueError as wrong:
            kept = wrong
        assert kept.__traceback__ is not None

    with cp.cuda.using_allocator(memory.allocator()), new_stream():
        fail()


def _an_array_that_there_is_no_room_for(memory: DeviceMemory) -> None:
    def fail() -> None:
        arrays = [cp.zeros(SIZE)]
        kept = None
        try:
            arrays.append(cp.empty(1 << 50, cp.uint8))
        except DeviceMemoryExhausted as wrong:
            kept = wrong
        assert kept is not None
        assert kept.__traceback__ is not None

    with cp.cuda.using_allocator(memory.allocator()), new_stream():
        fail()


def _another_thread_collects(memory: DeviceMemory) -> None:
    _arrays_in_a_cycle(memory)
    _an_exception_that_its_own_frame_holds(memory)
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    collecting.join()


def _views_outlive_their_array(memory: DeviceMemory) -> None:
    with cp.cuda.using_allocator(memory.allocator()), new_stream():
        view = cp.zeros(SIZE)[5:90]
    assert memory.statistics().allocations == 1
    Cycle(view)


def _arrays_at_the_end_of_the_process(memory: DeviceMemory) -> None:
    with cp.cuda.using_allocator(memory.allocator()), new_stream():
        globals()["kept"] = cp.zeros(SIZE)
        Cycle(cp.zeros(SIZE))
    gc.collect()


CASES: dict[str, Callable[[DeviceMemory], None]] = {
    case.__name__.lstrip("_"): case
    for case in (
        _arrays_in_a_cycle,
        _arrays_in_a_cycle_with_their_stream,
        _a_memory_in_a_cycle_with_its_arrays,
        _an_exception_that_its_own_frame_holds,
        _an_array_that_there_is_no_room_for,
        _another_thread_collects,
        _views_outlive_their_array,
        _arrays_at_the_end_of_the_process,
    )
}


def main(case: str) -> None:
    """Run one case and print how many allocations are left."""
    gc.disable()
    memory = DeviceMemory(0)
    CASES[case](memory)
    gc.collect()
    cp.cuda.runtime.deviceSynchronize()
    print(memory.statistics().allocations)


if __name__ == "__main__":
    main(sys.argv[1])
