"""NvmlReader reads an engine's GPUs by NVML, NVIDIA's management library, which `nvidia-smi` uses, too.

NVML does not know CUDA_VISIBLE_DEVICES and numbers the GPUs by itself. So the engine names its GPUs by PCI bus id or
UUID. All numbers are of the whole GPU, with all processes on it, also if the engine has only a part of it (MIG). NVML
has no utilization of a GPU that is divided.

Each call may take any time where a driver hangs, so a thread of its own makes them (`gpus.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

THROTTLES = {"power_cap": 0x04, "thermal": 0x20 | 0x40, "power_brake": 0x80}
"""Why a GPU's clocks are lower than they could be: the limit of its power, heat, or the server's power supply; with the
bits that NVML has for it."""
MOST_XIDS = 64
"""Most Xid errors that are taken up at once; the others come with the next reading."""
_UNKNOWN = (
    *("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "NO_DATA", "NOT_READY", "INVALID_ARGUMENT"),
    *("ARGUMENT_VERSION_MISMATCH", "DEPRECATED", "VGPU_ECC_NOT_SUPPORTED"),
)
"""NVML's errors where a GPU, or its driver, does not have a number."""


class GpuReading(Struct, frozen=True, kw_only=True):
    """One reading of a GPU. A number that its driver does not have is None, or not in its dict."""

    number: int
    """Its number at NVML, which `nvidia-smi` shows."""
    uuid: str
    utilization: float | None
    """Share (0 … 1) of the last second or less in which a kernel ran."""
    memory_used: int | None
    """Bytes that any process uses."""
    memory_size: int | None
    """Bytes of all its memory."""
    power: float | None
    """Watts, a mean over the last second."""
    power_limit: float | None
    """Watts that it takes at most."""
    energy: float | None
    """Joules since the driver was loaded."""
    temperature: int | None
    """Degrees Celsius of the chip."""
    slowdown_margin: int | None
    """Degrees below the temperature at which the GPU slows down."""
    throttled: dict[str, int]
    """Name in THROTTLES → 1 if the clocks are lower because of it now, or 0."""
    ecc_errors: dict[str, int]
    """Errors of memory since the driver was loaded: corrected, uncorrected."""


class XidError(Struct, frozen=True):
    """An error of a GPU that the driver has reported. NVIDIA's documents list the numbers."""

    number: int
    """The GPU's number at NVML."""
    uuid: str
    xid: int


class GpuReadings(Struct, frozen=True):
    """One reading of all GPUs of an engine, each of them once."""

    gpus: tuple[GpuReading, ...]
    failed: dict[str, str]
    """Name of a GPU that could not be read → why."""
    xids: tuple[XidError, ...]
    """The Xid errors since the last reading."""


class _Gpu(Struct, frozen=True):
    handle: Any
    number: int
    uuid: str


class NvmlReader:
    """Reads the GPUs of these names. Only one thread uses it."""

    def __init__(self, names: Sequence[str]) -> None:
        """Load NVML. Raise ImportError without nvidia-ml-py, and NVMLError without a driver."""
        import pynvml  # pyright: ignore[reportMissingImports]  # here: it is installed with what GPUs need

        self._nvml: Any = pynvml
        self._unknown = frozenset(getattr(pynvml, f"NVML_ERROR_{name}") for name in _UNKNOWN)
        self._names = tuple(names)
        self._gpus: dict[str, _Gpu] = {}
        self._at: dict[int, _Gpu] = {}
        """Address of a handle → its GPU."""
        pynvml.nvmlInit()
        self._events = self._known(pynvml.nvmlEventSetCreate)
        """The event set that Xid errors come to. None if the driver has none."""

    def read(self) -> GpuReadings:
        """Read all GPUs."""
        read: dict[str, GpuReading] = {}
        failed: dict[str, str] = {}
        for name in self._names:
            try:
                gpu = self._gpus.get(name) or self._open(name)
                if gpu.uuid not in read:  # several parts of one GPU
                    read[gpu.uuid] = self._read(gpu)
            except self._nvml.NVMLError as wrong:
                failed[name] = str(wrong)
        return GpuReadings(tuple(read.values()), failed, tuple(self._take_xids()))

    def close(self) -> None:
        """Give back what NVML keeps for this reader. Raise NVMLError."""
        self._nvml.nvmlShutdown()

    def _open(self, name: str) -> _Gpu:
        """Find a GPU, whose Xid errors are kept from now on. Raise NVMLError."""
        nvml = self._nvml
        if name.startswith(("GPU-", "MIG-")):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(name)
        if name.startswith("MIG-"):
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        gpu = _Gpu(handle, nvml.nvmlDeviceGetIndex(handle), nvml.nvmlDeviceGetUUID(handle))
        self._gpus[name] = gpu
        if self._events is not None and _address(handle) not in self._at:
            self._known(nvml.nvmlDeviceRegisterEvents, handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        self._at[_address(handle)] = gpu
        return gpu

    def _read(self, gpu: _Gpu) -> GpuReading:
        """Read a GPU. Raise NVMLError if it is lost."""
        nvml, handle = self._nvml, gpu.handle
        used = self._known(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._known(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._known(nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._known(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        energy = self._known(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        sensor = nvml.NVML_TEMPERATURE_GPU
        temperature = self._first(
            lambda: nvml.nvmlDeviceGetTemperatureV(handle, sensor),
            lambda: nvml.nvmlDeviceGetTemperature(handle, sensor),  # drivers before 570
        )
        bits = self._first(
            lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),  # drivers before 535
        )
        errors = {
            "corrected": self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "uncorrected": self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        }
        return GpuReading(
            number=gpu.number,
            uuid=gpu.uuid,
            utilization=None if used is None else used.gpu / 100,
            memory_used=None if memory is None else memory.used,
            memory_size=None if memory is None else memory.total,
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            energy=None if energy is None else energy / 1000,
            temperature=temperature,
            slowdown_margin=self._slowdown_margin(handle, temperature),
            throttled={} if bits is None else {name: int(bool(bits & mask)) for name, mask in THROTTLES.items()},
            ecc_errors={kind: count for kind, count in errors.items() if count is not None},
        )

    def _slowdown_margin(self, handle: Any, temperature: int | None) -> int | None:
        """Return how many degrees are left until the GPU slows down, which older GPUs say by the temperature at which
        they do."""
        nvml = self._nvml
        margin: int | None = self._known(nvml.nvmlDeviceGetMarginTemperature, handle)
        if margin is not None or temperature is None:
            return margin
        slowdown: int | None = self._known(
            nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )
        return slowdown - temperature if slowdown else None

    def _ecc_errors(self, handle: Any, kind: int) -> int | None:
        count: int | None = self._known(
            self._nvml.nvmlDeviceGetTotalEccErrors, handle, kind, self._nvml.NVML_VOLATILE_ECC
        )
        return count

    def _take_xids(self) -> list[XidError]:
        """Return the Xid errors since the last call."""
        found: list[XidError] = []
        try:
            while self._events is not None and len(found) < MOST_XIDS:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                gpu = self._at.get(_address(event.device))
                if gpu is not None:
                    found.append(XidError(gpu.number, gpu.uuid, int(event.eventData)))
        except self._nvml.NVMLError:
            pass  # there is none, which NVML says by raising; a GPU that is lost fails its own reading
        return found

    def _known(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what NVML answers; None if this GPU or its driver does not have it. Raise NVMLError otherwise."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as wrong:
            if wrong.value in self._unknown:
                return None
            raise

    def _first(self, *calls: Callable[[], Any]) -> Any:
        """Return the first answer that this driver has. None if it has none."""
        return next((answer for call in calls if (answer := self._known(call)) is not None), None)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
