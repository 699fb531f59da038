"""Blocks on a device, which is host memory or a GPU, for tests of copiers."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest

from services.worker.config import CopyPath
from services.worker.transfer.copier import Copier
from services.worker.transfer.host_copier import HostCopier
from services.worker.transfer.pinned_slots import CHUNK_BYTES
from tests.gpu.device import missing
from tests.worker.transfer.layer_major import layer_major

FRAGMENTS = 6
FRAGMENT_BYTES = 832
SLOTS = 24
BLOCK_BYTES = FRAGMENTS * FRAGMENT_BYTES


class Device(Protocol):
    """Layer-major blocks, of the shape that the constants say."""

    @property
    def copier(self) -> Copier: ...

    def write(self, slot: int, block: bytes) -> None: ...

    def read(self, slot: int) -> bytes: ...


class HostDevice:
    """A Device in host memory."""

    def __init__(self) -> None:
        self._array = np.zeros((FRAGMENTS, SLOTS, FRAGMENT_BYTES), np.uint8)
        shape = layer_major(self._array.ctypes.data, FRAGMENTS, FRAGMENT_BYTES, SLOTS)
        self.copier: Copier = HostCopier(shape, self._array)

    def write(self, slot: int, block: bytes) -> None:
        self._array[:, slot] = np.frombuffer(block, np.uint8).reshape(FRAGMENTS, FRAGMENT_BYTES)

    def read(self, slot: int) -> bytes:
        return self._array[:, slot].tobytes()


class CudaDevice:
    """A Device on a GPU."""

    def __init__(self, path: CopyPath = "staged", chunk_bytes: int = CHUNK_BYTES) -> None:
        import cupy  # pyright: ignore[reportMissingImports]

        from services.worker.transfer.cuda_copier import CudaCopier
        from services.worker.transfer.device_memory import DeviceMemory

        self._array: Any = cupy.zeros((FRAGMENTS, SLOTS, FRAGMENT_BYTES), cupy.uint8)
        self._asarray = cupy.asarray
        self.memory = DeviceMemory(0)
        shape = layer_major(self._array.data.ptr, FRAGMENTS, FRAGMENT_BYTES, SLOTS)
        self.copier = CudaCopier(shape, self.memory, time.perf_counter, path=path, chunk_bytes=chunk_bytes)

    def write(self, slot: int, block: bytes) -> None:
        self._array[:, slot] = self._asarray(np.frombuffer(block, np.uint8).reshape(FRAGMENTS, FRAGMENT_BYTES))
        self._array.device.synchronize()

    def read(self, slot: int) -> bytes:
        return bytes(self._array[:, slot].get().tobytes())


def need_gpu() -> Any:
    """Return CuPy; skip the test if there is no CuPy or no device."""
    if reason := missing():
        pytest.skip(reason)
    return importlib.import_module("cupy")


@contextmanager
def opened(kind: str) -> Iterator[Device]:
    """Make a device of `kind` "host" or "cuda". The owner of its copier closes it."""
    if kind == "host":
        yield HostDevice()
        return
    need_gpu()
    device = CudaDevice()
    yield device
    device.memory.close()
