"""Models on the device, for the tests in this directory. It imports CuPy, so import it after `cupy_on_a_device`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.config import CudaConfig
from services.worker.native.config import read_config
from services.worker.native.cuda.capacity import CudaSizes
from services.worker.native.cuda.runner import CudaRunner
from services.worker.native.cuda.weights import load_cuda_weights
from services.worker.transfer.device_memory import DeviceMemory


def cuda_runner(
    directory: Path, settings: CudaConfig, *, memory: DeviceMemory | None = None, **rest: Any
) -> CudaRunner:
    """Make a runner of a prepared directory; its weights lie in `memory` too."""
    memory = memory or DeviceMemory(0, keep_bytes=1 << 30)
    config = read_config(directory)
    with cp.cuda.using_allocator(memory.allocator()):
        weights = load_cuda_weights(directory, config, settings.dtype)
    sizes = CudaSizes(**{name: rest.pop(name) for name in CudaSizes.__struct_fields__ if name in rest})
    return CudaRunner(config, weights, memory, settings, sizes, **rest)
