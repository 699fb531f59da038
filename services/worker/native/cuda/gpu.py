"""Which GPU an engine computes on, and why there is none."""

from __future__ import annotations

import cupy as cp  # pyright: ignore[reportMissingImports]
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.transfer.cuda import use_device
from shared.errors import ConfigError

_INSUFFICIENT_DRIVER = 35
"""cudaErrorInsufficientDriver: also where there is no driver at all."""


def use_gpu(gpu: int) -> None:
    """This thread's from now on. Raises ConfigError that says what was found, DeviceFailed."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as wrong:
        raise ConfigError(f"device is cuda, and CUDA finds no GPU: {_why(wrong)}") from None
    if gpu >= count:
        shown = "one GPU, number 0" if count == 1 else f"{count} GPUs, 0 to {count - 1}"
        raise ConfigError(f"cuda.gpu is {gpu}, and CUDA shows {shown}; CUDA_VISIBLE_DEVICES chooses which")
    use_device(gpu)


def _why(wrong: Exception) -> str:
    if getattr(wrong, "status", None) != _INSUFFICIENT_DRIVER:
        return str(wrong)
    driver, needed = _version(runtime.driverGetVersion()), _version(runtime.runtimeGetVersion())
    if driver == "0.0":
        return "no NVIDIA driver is installed, or libcuda.so.1 is not found"
    return f"the NVIDIA driver knows CUDA up to {driver}, CuPy {cp.__version__} needs {needed}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
