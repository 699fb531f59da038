"""CudaMatrixMemory: a GPU's memory for weights that engines share, and what loads them into it."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.config import WorkerConfig
from services.worker.model.tensor_header import Shape
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.shared_weights import Place, Progress, SharedCudaWeights
from services.worker.native.cuda.weights import DTYPES, CudaWeights, load_cuda_weights
from services.worker.native.cuda.weights_layout import WeightsLayout
from services.worker.native.linear import Array
from services.worker.sharing.device_pages import DeviceMapper, DeviceMapping, DevicePages
from services.worker.sharing.driver import Driver
from services.worker.transfer.errors import DeviceFailed

_log = logging.getLogger(__name__)


class CudaMatrixMemory:
    """A MatrixMemory of one GPU, which is the thread's current one."""

    def __init__(self, settings: WorkerConfig, directory: Path, config: ModelConfig) -> None:
        """Ask the driver about the settings' GPU. Raise DeviceFailed."""
        driver = Driver()
        self._gpu = settings.cuda.gpu
        self.device, self.page_bytes = driver.uuid(self._gpu), driver.granularity(self._gpu)
        self._model = directory, config, settings.cuda.dtype

    def allocate(self, size_bytes: int) -> DevicePages:
        return DevicePages(size_bytes, self._gpu)

    def map(self, descriptors: list[int], size_bytes: int) -> DeviceMapping:
        return DeviceMapper(self._gpu).map(descriptors, size_bytes, self.device)

    def array(self, address: int, shape: tuple[int, ...], dtype: type) -> Array:
        memory = cp.cuda.UnownedMemory(address, prod(shape) * self.item_bytes(dtype), self, self._gpu)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))

    def item_bytes(self, dtype: type) -> int:
        return int(cp.dtype(dtype).itemsize)

    def load(self, progress: Progress, place: Place | None, *, fills: bool) -> CudaWeights:
        return load_cuda_weights(*self._model, progress, place=place or cp.empty, fills=fills)


def cuda_weights_of(
    settings: WorkerConfig, directory: Path, config: ModelConfig, shapes: dict[str, Shape]
) -> SharedCudaWeights[CudaWeights] | None:
    """Return the weights that the memory service of the settings keeps. None if they name none, or the GPU has no
    memory for other processes. Raise ModelError."""
    if not settings.weights.memory:
        return None
    dtype = settings.cuda.dtype
    layout = WeightsLayout(shapes, dtype, int(cp.dtype(DTYPES[dtype]).itemsize))
    try:
        memory = CudaMatrixMemory(settings, directory, config)
    except DeviceFailed as wrong:
        _log.warning("this engine has weights of its own: weights.memory: %s", wrong)
        return None
    return SharedCudaWeights(settings, layout, memory)
