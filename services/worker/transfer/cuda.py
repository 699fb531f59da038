"""What this package needs of CUDA, by CuPy's runtime, and CUDA's errors in our words. Needs CuPy and a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.errors import DeviceFailed, PinRefused

Stream = Any
"""cupy.cuda.Stream; CuPy has no types."""
Event = Any
"""cupy.cuda.Event."""
Error: type[Exception] = runtime.CUDARuntimeError
ERRORS: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
"""The runtime's and the driver's."""
OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation."""
SPIN_BYTES = 16 << 20
"""0.3 ms of an H200's link."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Its first line has the release of the kernel's module, and when it was built."""
ANYWHERE: int = runtime.memcpyDefault
"""Of a copy: the addresses say where its ends lie."""


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises DeviceFailed where CUDA or its driver complains, or CuPy finds no room."""
    try:
        yield
    except ERRORS as wrong:
        raise DeviceFailed(str(wrong)) from wrong
    except cupy.cuda.memory.OutOfMemoryError as wrong:
        raise DeviceFailed(f"cudaErrorMemoryAllocation: {wrong}") from wrong


def use(device: int) -> None:
    """This thread's device; each thread says so itself."""
    with our_errors():
        cupy.cuda.Device(device).use()


def names(device: int) -> tuple[str, str, str]:
    """Of the GPU, of its driver (the newest CUDA that it knows and, where Linux tells, its release), of CuPy."""
    with our_errors():
        properties = runtime.getDeviceProperties(device)
        driver = str(runtime.driverGetVersion())
    with suppress(OSError):
        driver += " " + DRIVER_FILE.read_text().partition("\n")[0]
    return properties["name"].decode(), driver, str(cupy.__version__)


def stream() -> Stream:
    """One that waits for none but those it is told to wait for."""
    return cupy.cuda.Stream(non_blocking=True)


def sleeping_event() -> Event:
    """Whoever waits for it sleeps, and lets other threads run."""
    return cupy.cuda.Event(block=True, disable_timing=True)


def end_event(size_bytes: int) -> Event:
    """Of so many bytes' copies. Whoever waits for it sleeps; where they are few, spins, without Python's lock: to be
    woken takes 35 to 80 µs, and a block of 2 MiB takes 38."""
    return cupy.cuda.Event(block=size_bytes > SPIN_BYTES, disable_timing=True)


def order_event() -> Event:
    """For streams to wait for; costs less."""
    return cupy.cuda.Event(block=False, disable_timing=True)


def register(address: int, size_bytes: int) -> None:
    """Pins whole pages of host memory, for copies at full speed and kernels. Blocking: 0.04 s a GiB, 0.5 s where they
    were never touched. Raises PinRefused."""
    try:
        runtime.hostRegister(address, size_bytes, 0)
    except runtime.CUDARuntimeError as wrong:
        raise PinRefused(str(wrong)) from wrong


def unregister(address: int) -> None:
    """What `register` was given."""
    with our_errors():
        runtime.hostUnregister(address)
