"""DeviceMemory: one pool of device memory, allocated and freed in the order of a stream.

    reserved  │ in use │ free, kept up to `keep_bytes` so that the next allocation needs no call to the driver │

A small allocation costs about 1 µs while the pool has room, and 100 µs when the driver must be asked. Freed memory can
be used again by the stream on which it was freed at once, and by others after that stream has reached the free.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from services.worker.transfer.cuda import OUT_OF_MEMORY, Error, Stream, new_stream, translated_errors
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted

# CUDA's cudaMemPoolAttr, and the kinds of a pool's properties.
_RELEASE_THRESHOLD, _RESERVED, _USED = 4, 5, 7
_PINNED, _NO_HANDLE, _ON_DEVICE = 1, 0, 1
_in_use: set[DeviceMemory] = set()
"""Every DeviceMemory that has allocations. This keeps it and its streams out of garbage that holds its arrays: the
collector would finalize them in any order, and memory must not be freed on a stream that no longer exists."""


class MemoryStatistics(Struct, frozen=True):
    """Sizes of the pool, in bytes, and counts."""

    used_bytes: int
    reserved_bytes: int
    allocations: int
    """Allocations that are not freed."""
    allocated: int
    """All allocations since the pool was made."""


class DeviceMemory:
    """A pool of one device's memory.

    `allocate`, `free`, `statistics`, the allocator, and the end of an array that came from it may run at once, on any
    threads. `close` runs alone, after all of them. A pool that is not closed ends when nothing refers to it any longer:
    else its free memory would be lost to all other processes.
    """

    def __init__(self, device: int, *, reserve_bytes: int = 0, keep_bytes: int | None = None) -> None:
        """Make the pool. Raise DeviceMemoryExhausted.

        `reserve_bytes` are taken from the device at once, and written. `keep_bytes`, at least as many, stay in the
        pool when they are free.
        """
        self.device = device
        keep_bytes = reserve_bytes if keep_bytes is None else keep_bytes
        assert keep_bytes >= reserve_bytes
        self._lock = threading.RLock()
        """Guards the counts and `_streams`. It is reentrant because the collector may finalize an array, which frees
        its memory, at any line of the thread that holds the lock."""
        self._allocated = 0
        self._streams: dict[int, Stream | int] = {}
        """The stream on which each address in use is freed. The entry keeps the stream alive until then."""
        with cupy.cuda.Device(device), translated_errors():
            own = new_stream()
            self._pool: int = runtime.memPoolCreate(runtime.MemPoolProps(_PINNED, _NO_HANDLE, _ON_DEVICE, device))
            self._destroy = weakref.finalize(self, runtime.memPoolDestroy, self._pool)
            self._destroy.atexit = False  # the driver may be gone by then, and gives everything back anyway
            runtime.memPoolSetAttribute(self._pool, _RELEASE_THRESHOLD, keep_bytes)
            if reserve_bytes:
                address = self.allocate(reserve_bytes, own)
                runtime.memsetAsync(address, 0, reserve_bytes, own.ptr)
                self.free(address)
                own.synchronize()

    def allocate(self, size_bytes: int, on: Stream | int) -> int:
        """Return the 256-byte aligned address of uninitialised memory, ready for work on `on`.

        `on` is a stream, or the raw handle (cudaStream_t) of one that lives until the memory is freed; the memory is
        freed in its order. This device must be the thread's current one. Raise DeviceMemoryExhausted if there is no
        room even after unused memory was given back to the device.
        """
        # `allocate` and `free` together take less than 3 µs, 1.3 of them CUDA's. `translated_errors` would add one.
        assert size_bytes > 0
        handle = on if isinstance(on, int) else on.ptr
        try:
            address: int = runtime.mallocFromPoolAsync(size_bytes, self._pool, handle)
        except Error as wrong:
            address = self._after_a_trim(size_bytes, handle, wrong)
        with self._lock:
            self._streams[address] = on
            self._allocated += 1
            if len(self._streams) == 1:
                _in_use.add(self)
        return address

    def free(self, address: int) -> None:
        """Free memory in the order of the stream that it was allocated for. Work on other streams must have ended."""
        with self._lock:
            on = self._streams.pop(address)
            if not self._streams:
                _in_use.discard(self)
        try:
            runtime.freeAsync(address, on if isinstance(on, int) else on.ptr)
        except Error as wrong:
            raise DeviceFailed(str(wrong)) from wrong

    def allocator(self) -> Any:
        """Return an allocator for `cupy.cuda.set_allocator`, so that arrays take their memory from this pool.

        An array's memory is allocated for the stream that is current when the array is made. The collector may free
        it, on any thread.
        """

        def allocate(size_bytes: int) -> Any:
            return cupy.cuda.MemoryPointer(_ArrayMemory(self, size_bytes), 0)

        return allocate

    def statistics(self) -> MemoryStatistics:
        with translated_errors():
            used, reserved = (int(runtime.memPoolGetAttribute(self._pool, which)) for which in (_USED, _RESERVED))
        with self._lock:
            return MemoryStatistics(
                used_bytes=used,
                reserved_bytes=reserved,
                allocations=len(self._streams),
                allocated=self._allocated,
            )

    def trim(self) -> None:
        """Give all free memory back to the device, after everything that it still computes."""
        with cupy.cuda.Device(self.device), translated_errors():
            runtime.deviceSynchronize()
            runtime.memPoolTrimTo(self._pool, 0)

    def close(self) -> None:
        """Destroy the pool. All memory must have been freed, and the streams must have reached those frees."""
        assert not self._streams, f"{len(self._streams)} allocations are in use"
        with translated_errors():
            self._destroy()

    def _after_a_trim(self, size_bytes: int, handle: int, wrong: Exception) -> int:
        if getattr(wrong, "status", None) != OUT_OF_MEMORY:
            raise DeviceFailed(str(wrong)) from wrong
        with translated_errors():
            runtime.streamSynchronize(handle)  # memory that was freed on it is unused only then
            runtime.memPoolTrimTo(self._pool, 0)
        try:
            return int(runtime.mallocFromPoolAsync(size_bytes, self._pool, handle))
        except Error as again:
            if getattr(again, "status", None) != OUT_OF_MEMORY:
                raise DeviceFailed(str(again)) from again
        statistics = self.statistics()
        with translated_errors():
            free_bytes = runtime.memGetInfo()[0]
        raise DeviceMemoryExhausted(size_bytes, statistics.used_bytes, statistics.reserved_bytes, free_bytes)


class _ArrayMemory(cupy.cuda.BaseMemory):  # type: ignore[misc]
    """A CuPy array's memory from a DeviceMemory; an array of no bytes holds address 0.

    It is freed in `__del__`, because the collector calls the finalizers of cyclic garbage before it clears anything.
    `cupy.cuda.PythonFunctionAllocator` instead keeps a function and calls it when the C part of the array goes. The
    collector may have cleared that function by then, and the process dies of a segmentation fault.
    """

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        self._memory = memory
        self.size = size_bytes
        self.device_id = memory.device
        self.ptr = memory.allocate(size_bytes, cupy.cuda.get_current_stream()) if size_bytes else 0

    def __del__(self) -> None:
        if self.ptr:
            with suppress(DeviceFailed):  # a finalizer has no caller, and on a lost GPU there is nothing to free
                self._memory.free(self.ptr)
