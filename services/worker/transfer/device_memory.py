"""DeviceMemory: one pool of device memory, allocated and freed in the order of a stream.

    reserved  │ in use │ free, kept up to `keep_bytes` so that the next allocation needs no call to the driver │

A small allocation costs about a microsecond while the pool has room, a hundred when the device must be asked. Memory
that is freed belongs to the stream it was freed on, until that has come so far.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from services.worker.transfer.cuda import OUT_OF_MEMORY, Error, Stream, our_errors, stream
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted

# CUDA's cudaMemPoolAttr, and the kinds of a pool's properties.
_RELEASE_THRESHOLD, _RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 4, 5, 6, 7, 8
_PINNED, _NO_HANDLE, _ON_DEVICE = 1, 0, 1
_in_use: set[DeviceMemory] = set()
"""Those with allocations. So none of them, and no stream of theirs, can be in garbage together with its arrays: the
collector would end them in any order, and memory must not be freed on a stream that is gone."""


class MemoryStatistics(Struct, frozen=True):
    """In bytes; `most_`: since the pool was made."""

    used_bytes: int
    reserved_bytes: int
    most_used_bytes: int
    most_reserved_bytes: int
    allocations: int
    """That are not freed …"""
    allocated: int
    """… and since the pool was made."""
    trims: int
    """How often unused memory had to go before an allocation found room."""
    refused: int


class DeviceMemory:
    """See the module.

    `allocate`, `free`, `statistics`, the allocator, and the end of an array that came from it may run at once, on any
    threads. `close` runs alone, after all of them.
    """

    def __init__(self, device: int, *, reserve_bytes: int = 0, keep_bytes: int | None = None) -> None:
        """`reserve_bytes` are taken from the device at once, and written; `keep_bytes`, at least as many, stay when
        they are free. Raises DeviceMemoryExhausted."""
        self.device = device
        keep_bytes = reserve_bytes if keep_bytes is None else keep_bytes
        assert keep_bytes >= reserve_bytes
        self._lock = threading.RLock()
        """Guards the counts and the places. The collector may end an array, which frees, at any line of the thread that
        holds the lock: so that thread must get it a second time."""
        self._allocated = 0
        self._trims = 0
        self._refused = 0
        self._streams: dict[int, Stream | int] = {}
        """Of each address in use, on which it is freed: so a stream outlives what was allocated for it."""
        with cupy.cuda.Device(device), our_errors():
            own = stream()
            self._pool: int = runtime.memPoolCreate(runtime.MemPoolProps(_PINNED, _NO_HANDLE, _ON_DEVICE, device))
            runtime.memPoolSetAttribute(self._pool, _RELEASE_THRESHOLD, keep_bytes)
            if reserve_bytes:
                address = self.allocate(reserve_bytes, own)
                runtime.memsetAsync(address, 0, reserve_bytes, own.ptr)
                self.free(address)
                own.synchronize()

    def allocate(self, size_bytes: int, on: Stream | int) -> int:
        """An address, 256-byte aligned; what is there is anything. Ready for work on `on`, a stream or the raw handle
        of one (cudaStream_t) that lives until it is freed, and freed in its order. This device is the thread's current
        one. Raises DeviceMemoryExhausted, after unused memory was given back to the device and asked for again."""
        # Both together take less than 3 µs, 1.3 of them CUDA's: so no `our_errors` here, which takes one.
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
        """In the order of the stream that it was allocated for: work on others must have ended."""
        with self._lock:
            on = self._streams.pop(address)
            if not self._streams:
                _in_use.discard(self)
        try:
            runtime.freeAsync(address, on if isinstance(on, int) else on.ptr)
        except Error as wrong:
            raise DeviceFailed(str(wrong)) from wrong

    def allocator(self) -> Any:
        """For `cupy.cuda.set_allocator`: arrays then come from here, for the stream that is current when they are
        made. They are freed by the collector too, on whichever thread it runs."""

        def allocate(size_bytes: int) -> Any:
            return cupy.cuda.MemoryPointer(_ArrayMemory(self, size_bytes), 0)

        return allocate

    def statistics(self) -> MemoryStatistics:
        with our_errors():
            used, reserved, most_used, most_reserved = (
                int(runtime.memPoolGetAttribute(self._pool, attribute))
                for attribute in (_USED, _RESERVED, _USED_HIGH, _RESERVED_HIGH)
            )
        with self._lock:
            return MemoryStatistics(
                used_bytes=used,
                reserved_bytes=reserved,
                most_used_bytes=most_used,
                most_reserved_bytes=most_reserved,
                allocations=len(self._streams),
                allocated=self._allocated,
                trims=self._trims,
                refused=self._refused,
            )

    def close(self) -> None:
        """All was freed, and the streams have come so far."""
        assert not self._streams, f"{len(self._streams)} allocations are in use"
        with our_errors():
            runtime.memPoolDestroy(self._pool)

    def _after_a_trim(self, size_bytes: int, handle: int, wrong: Exception) -> int:
        if getattr(wrong, "status", None) != OUT_OF_MEMORY:
            raise DeviceFailed(str(wrong)) from wrong
        with our_errors():
            runtime.streamSynchronize(handle)  # what was freed on it is unused only then
            runtime.memPoolTrimTo(self._pool, 0)
        with self._lock:
            self._trims += 1
        try:
            return int(runtime.mallocFromPoolAsync(size_bytes, self._pool, handle))
        except Error as again:
            if getattr(again, "status", None) != OUT_OF_MEMORY:
                raise DeviceFailed(str(again)) from again
        with self._lock:
            self._refused += 1
        told = self.statistics()
        with our_errors():
            free_bytes = runtime.memGetInfo()[0]
        raise DeviceMemoryExhausted(size_bytes, told.used_bytes, told.reserved_bytes, free_bytes)


class _ArrayMemory(cupy.cuda.BaseMemory):  # type: ignore[misc]
    """What a CuPy array holds of a DeviceMemory; an array of no bytes holds address 0.

    It frees in `__del__`. The collector calls the finalizers of cyclic garbage before it clears anything in it. A
    function that CuPy keeps and calls when the C part of the array goes, as `cupy.cuda.PythonFunctionAllocator` does,
    may be cleared by then: the process dies of a segmentation fault.
    """

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        self._memory = memory
        self.size = size_bytes
        self.device_id = memory.device
        self.ptr = memory.allocate(size_bytes, cupy.cuda.get_current_stream()) if size_bytes else 0

    def __del__(self) -> None:
        if self.ptr:
            with suppress(DeviceFailed):  # a finalizer has no caller; a GPU that is lost has nothing to free
                self._memory.free(self.ptr)
