"""The CUDA calls that this package needs, through CuPy's runtime, with CUDA's errors translated to ours.

Needs CuPy and a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.errors import DeviceFailed, PinRefused

Stream = Any
"""A cupy.cuda.Stream; CuPy has no types."""
Event = Any
"""A cupy.cuda.Event; CuPy has no types."""
Error: type[Exception] = runtime.CUDARuntimeError
ERRORS: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
"""Exceptions of CUDA's runtime and of its driver."""
OUT_OF_MEMORY = 2
"""The status code cudaErrorMemoryAllocation."""
SPIN_BYTES = 16 << 20
"""Up to this many bytes, a thread spins until copies end: 0.3 ms on an H200's link."""
ANYWHERE: int = runtime.memcpyDefault
"""The kind of a copy whose addresses say whether each end lies on the host or on a device."""


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise DeviceFailed for errors of CUDA and its driver, and if CuPy finds no memory."""
    try:
        yield
    except ERRORS as wrong:
        raise DeviceFailed(str(wrong)) from wrong
    except cupy.cuda.memory.OutOfMemoryError as wrong:
        raise DeviceFailed(f"cudaErrorMemoryAllocation: {wrong}") from wrong


def use_device(device: int) -> None:
    """Make `device` the calling thread's device; each thread must do this itself."""
    with translated_errors():
        cupy.cuda.Device(device).use()


def new_stream() -> Stream:
    """Return a stream that waits for no other stream unless it is asked to (non-blocking)."""
    return cupy.cuda.Stream(non_blocking=True)


def sleeping_event() -> Event:
    """Return an event for which a thread waits asleep, so that other threads can run."""
    return cupy.cuda.Event(block=True, disable_timing=True)


def end_event(size_bytes: int) -> Event:
    """Return an event for the end of copies of `size_bytes`.

    A thread waits for it asleep, or spins without Python's lock if the copies are small: waking up takes 35 to 80 µs,
    and a copy of 2 MiB takes 38 µs.
    """
    return cupy.cuda.Event(block=size_bytes > SPIN_BYTES, disable_timing=True)


def order_event() -> Event:
    """Return an event for which only streams wait; it costs less than the others."""
    return cupy.cuda.Event(block=False, disable_timing=True)


def register(address: int, size_bytes: int) -> None:
    """Pin whole pages of host memory, for kernels and for copies at full speed. Raise PinRefused.

    This blocks for 0.04 s a GiB, or 0.5 s a GiB if the pages were never touched.
    """
    try:
        runtime.hostRegister(address, size_bytes, 0)
    except runtime.CUDARuntimeError as wrong:
        raise PinRefused(str(wrong)) from wrong


def unregister(address: int) -> None:
    """Unpin the pages that `register` pinned at this address."""
    with translated_errors():
        runtime.hostUnregister(address)
