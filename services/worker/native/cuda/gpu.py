"""Selects the GPU that an engine computes on, or says why there is none."""

from __future__ import annotations

import cupy as cp  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import use_device
from shared.errors import ConfigError

_INSUFFICIENT_DRIVER = 35
"""The status code cudaErrorInsufficientDriver, which also means that there is no driver at all."""


def use_gpu(gpu: int) -> None:
    """Make `gpu` the calling thread's device. Raise ConfigError, which says what was found, and DeviceFailed."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as wrong:
        raise ConfigError(f"device is cuda, but CUDA finds no GPU: {_why(wrong)}") from None
    if gpu >= count:
        shown = "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"
        raise ConfigError(f"cuda.gpu is {gpu}, but CUDA shows {shown}; CUDA_VISIBLE_DEVICES chooses which")
    use_device(gpu)


def _why(wrong: Exception) -> str:
    if getattr(wrong, "status", None) != _INSUFFICIENT_DRIVER:
        return str(wrong)
    driver, needed = _version(runtime.driverGetVersion()), _version(runtime.runtimeGetVersion())
    if driver == "0.0":
        return "no NVIDIA driver is installed, or libcuda.so.1 is not found"
    return f"the NVIDIA driver supports CUDA up to {driver}, but CuPy {cp.__version__} needs {needed}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
