"""Device memory that other processes can map, by a descriptor; and such memory of another process, mapped for reading,
or for writing too between the ranks of a group, which trust each other.

    cuMemCreate ──▶ a descriptor ── SCM_RIGHTS ──▶ cuMemImportFromShareableHandle ──▶ mapped, read-only

The driver keeps the memory until its last mapping, handle and descriptor is gone, in whatever process. So a reader
never reads memory that was freed: not when the sharer dies in the middle of a copy, and not when it closes. (Memory of
`cudaMalloc` with an IPC handle must outlive its readers, and that of `cudaMallocAsync` has no IPC handle.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.sharing.driver import READ, READ_AND_WRITE, Driver
from services.worker.sharing.memory import MapFailed
from services.worker.transfer.cuda import translated_errors, use_device
from services.worker.transfer.errors import DeviceFailed


class DevicePages:
    """Device memory that other processes can map."""

    def __init__(self, size_bytes: int, device: int) -> None:
        """Allocate the memory; `size_bytes` is rounded up to whole pages. Raise DeviceMemoryExhausted; DeviceFailed,
        also if this GPU has no such memory."""
        use_device(device)
        self._driver = Driver()
        self._driver.check_descriptors(device)
        page = self._driver.granularity(device)
        self.size_bytes = -(-size_bytes // page) * page
        self.device = self._driver.uuid(device)
        handle = self._driver.create(self.size_bytes, device)
        try:
            self._descriptor = self._driver.export(handle)
            try:
                self.address = self._driver.map(handle, self.size_bytes, device, READ_AND_WRITE)
            except DeviceFailed:
                os.close(self._descriptor)  # it keeps the memory
                raise
        finally:
            self._driver.release(handle)
        self._ordinal = device

    def array(self) -> Any:
        """Return all bytes as a CuPy array (size_bytes,), which is valid until `close`."""
        memory = cupy.cuda.UnownedMemory(self.address, self.size_bytes, self, self._ordinal)
        return cupy.ndarray((self.size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def descriptors(self) -> Sequence[int]:
        return [self._descriptor]

    def protect(self) -> None:
        """Await all work of the device. From now on this process only reads the memory."""
        with translated_errors():
            runtime.deviceSynchronize()
        self._driver.set_access(self.address, self.size_bytes, self._ordinal, READ)

    def close(self) -> None:
        """Let go of the memory. Nothing of this process may use it; other processes may."""
        os.close(self._descriptor)
        self._driver.unmap(self.address, self.size_bytes)


class DeviceMapper:
    """Maps the memory of other processes for one device of this one, for reading unless `access` says otherwise."""

    def __init__(self, device: int, access: int = READ) -> None:
        self._device = device
        self._access = access

    def map(self, descriptors: Sequence[int], size_bytes: int, device: str) -> DeviceMapping:
        if len(descriptors) != 1 or not device:
            raise MapFailed(f"device memory has one descriptor and a GPU; these are {len(descriptors)} and {device!r}")
        try:
            use_device(self._device)
            driver = Driver()
            self._check_reach(device, driver)
            handle = driver.import_(descriptors[0])
            try:
                address = driver.map(handle, size_bytes, self._device, self._access)
            finally:
                driver.release(handle)
        except DeviceFailed as wrong:
            raise MapFailed(str(wrong)) from wrong
        return DeviceMapping(driver, address, size_bytes)

    def _check_reach(self, uuid: str, driver: Driver) -> None:
        """Raise MapFailed if the own GPU is known to have no access to the memory of the one with this UUID."""
        with translated_errors():
            visible = [number for number in range(runtime.getDeviceCount()) if driver.uuid(number) == uuid]
            for number in visible:  # one that this process does not see is left to the driver to refuse
                if number != self._device and not runtime.deviceCanAccessPeer(self._device, number):
                    raise MapFailed(f"GPU {self._device} has no access to the memory of GPU {number}")


class DeviceMapping:
    """Device memory of another process, which this process cannot write unless its mapper says so."""

    def __init__(self, driver: Driver, address: int, size_bytes: int) -> None:
        self.address = address
        self._driver = driver
        self._size_bytes = size_bytes

    def close(self) -> None:
        if self._size_bytes:
            self._driver.unmap(self.address, self._size_bytes)
            self._size_bytes = 0
