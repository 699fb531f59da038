"""deploy/local/check/gpu.py: with a CuPy that copies in the machine's memory, as CI has no GPU."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deploy.local.check import gpu
from deploy.local.check.measurements import GpusMeasured, Unmeasured

SIZE_BYTES = 1 << 20


class LostDevice(Exception):
    """What CuPy raises, under another name."""


class Memory:
    """Memory of a device, or pinned memory."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = ctypes.create_string_buffer(size_bytes)
        self.ptr = ctypes.addressof(self._bytes)


class Event:
    """An event that is reached at once."""

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class Device:
    """A context manager that chooses a device."""

    def __init__(self, index: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *failure: object) -> None: ...


def cupy_of(count: int, peers: set[tuple[int, int]], *, pins: bool = True) -> dict[str, ModuleType]:
    """The modules `cupy` and `cupy.cuda` of a machine with that number of GPUs."""

    def count_devices() -> int:
        if not count:
            raise LostDevice("cudaErrorNoDevice: no CUDA-capable device is detected")
        return count

    def register(address: int, size_bytes: int, flags: int) -> None:
        ctypes.memset(address, 1, size_bytes)
        if not pins:
            raise LostDevice("cudaErrorInvalidValue: invalid argument")

    def copy(to: int, source: int, size_bytes: int, kind: int, stream: object) -> None:
        assert kind in (1, 2, 4)
        assert kind != 4 or reached, "a copy between GPUs without peer access goes through the machine's memory"
        ctypes.memmove(to, source, size_bytes)

    reached: set[int] = set()

    def enable(peer: int) -> None:
        assert peer not in reached, "CUDA refuses to do this twice"
        reached.add(peer)

    runtime = SimpleNamespace(
        CUDARuntimeError=LostDevice,
        getDeviceCount=count_devices,
        getDeviceProperties=lambda index: {"name": f"GPU of tests {index}".encode()},
        deviceCanAccessPeer=lambda one, other: int((one, other) in peers),
        hostRegister=register,
        hostUnregister=lambda address: None,
        deviceEnablePeerAccess=enable,
        deviceDisablePeerAccess=reached.remove,
        memcpyAsync=copy,
    )
    cuda: Any = ModuleType("cupy.cuda")
    cuda.runtime, cuda.Device, cuda.Event = runtime, Device, Event
    cuda.Stream = lambda non_blocking: SimpleNamespace(ptr=0)
    cuda.alloc = cuda.alloc_pinned_memory = Memory
    cuda.get_elapsed_time = lambda began, ended: 0.5
    cupy: Any = ModuleType("cupy")
    cupy.cuda = cuda
    cupy.__spec__ = SimpleNamespace(name="cupy")
    return {"cupy": cupy, "cupy.cuda": cuda}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this a machine with GPUs, and return what is measured."""

    def measured(*about: Any, **more: Any) -> GpusMeasured | Unmeasured:
        (tmp_path / "driver").touch()
        monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
        monkeypatch.setattr(gpu, "COPY_BYTES", SIZE_BYTES)
        for name, module in cupy_of(*about, **more).items():
            monkeypatch.setitem(sys.modules, name, module)
        return gpu.measure(tmp_path)

    return measured


def test_gpus_are_measured_with_the_peers_of_each(machine: Any) -> None:
    found = machine(3, {(0, 1), (1, 0), (2, 0)})
    assert isinstance(found, GpusMeasured)
    assert [each.peers for each in found.gpus] == [(1,), (0,), (0,)]
    assert [each.peer_bytes_s for each in found.gpus] == [SIZE_BYTES / 0.0005] * 3
    assert machine(1, set()).gpus[0].peer_bytes_s == 0
    assert found.gpus[2].name == "GPU of tests 2"
    assert found.gpus[0].to_device_bytes_s == SIZE_BYTES / 0.0005
    assert found.pool_pinned


def test_a_pool_that_cannot_be_pinned_is_said(machine: Any) -> None:
    found = machine(1, set(), pins=False)
    assert (found.pool_pinned, found.pool_refusal) == (False, "cudaErrorInvalidValue: invalid argument")


def test_a_driver_without_a_gpu_is_a_fault(machine: Any) -> None:
    found = machine(0, set())
    assert isinstance(found, Unmeasured)
    assert found.wanted
    assert "no CUDA-capable device" in found.reason


def test_without_a_driver_or_without_cupy_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRIVER", tmp_path / "driver")
    assert gpu.measure(tmp_path) == Unmeasured("There is no NVIDIA driver here")
    (tmp_path / "driver").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = gpu.measure(tmp_path)
    assert isinstance(found, Unmeasured)
    assert not found.wanted
    assert "install-gpu" in found.advice
