"""SharedCudaWeights: a model's matrices on the GPU, in memory that its memory service keeps.

    ask the service ──▶ committed: import the handle, map it for reading
          │        └──▶ none has made them: allocate, fill, map for reading, export, commit
          └── no service, no answer, no room ──▶ memory of one's own, as without a service, and one line says so

The service needs no CUDA: a descriptor of the memory keeps it alive, also when the last engine is dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]

from services.worker.config import WorkerConfig
from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.memory.messages import MOST_NAME, WeightsIdentity
from services.worker.model.tensor_header import Shape
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.weights import DTYPES, CudaWeights, load_cuda_weights
from services.worker.native.cuda.weights_layout import WeightsLayout
from services.worker.native.linear import Array
from services.worker.native.prepare import source_key
from services.worker.native.shared_weights import WRITER_WAIT_S
from services.worker.sharing.device_pages import DeviceMapper, DeviceMapping, DevicePages
from services.worker.sharing.driver import Driver
from services.worker.sharing.memory import MapFailed
from services.worker.sharing.packets import close_all
from services.worker.transfer.errors import DeviceFailed

_log = logging.getLogger(__name__)


class SharedCudaWeights:
    """The matrices of one engine. It belongs to one thread, whose device is that of the settings."""

    def __init__(self, settings: WorkerConfig, directory: Path, config: ModelConfig, shapes: dict[str, Shape]) -> None:
        """Find out which weights the model has; nothing is mapped before `load`. Raise ModelError, DeviceFailed."""
        self._directory, self._config, self._settings = directory, config, settings
        self._element_type, self._device = settings.cuda.dtype, settings.cuda.gpu
        element_bytes = cp.dtype(DTYPES[self._element_type]).itemsize
        self._layout = WeightsLayout(shapes, self._element_type, element_bytes)
        driver = Driver()
        page = driver.granularity(self._device)
        self._size_bytes = -(-self._layout.size_bytes // page) * page
        key, uuid = source_key(Path(settings.model)), driver.uuid(self._device)
        self._identity = WeightsIdentity(key, self._layout.digest, uuid)
        self._lock: WeightsLock | None = None
        self._mapped: DevicePages | DeviceMapping | None = None

    def load(self, progress: Callable[[float], None] = lambda _share: None) -> CudaWeights:
        """Return the weights: mapped, made for all engines, or this engine's own. Raise ModelError,
        DeviceMemoryExhausted."""
        try:
            return self._load_shared(progress)
        except (NoSharedWeights, MapFailed, DeviceFailed) as wrong:
            self.release()
            _log.warning("this engine has weights of its own: %s", wrong)
            return load_cuda_weights(self._directory, self._config, self._element_type, progress)

    def unmap(self) -> None:
        """Unmap the weights, which no array has any more. The service keeps them for this engine until `release`."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

    def release(self) -> None:
        """Unmap them, and let the service free them once no other engine maps them. `load` may follow."""
        self.unmap()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _load_shared(self, progress: Callable[[float], None]) -> CudaWeights:
        self.release()  # a lock asks once
        weights = self._settings.weights
        lock = WeightsLock(Path(weights.memory), self._identity, self._size_bytes, weights.timeout_s)
        self._lock = lock
        name = (self._settings.model_name or Path(self._settings.model).name)[:MOST_NAME]
        descriptors = lock.ask(name, WRITER_WAIT_S, lambda: None)
        if descriptors is None:
            return self._make(lock, progress)
        with ExitStack() as opened:
            opened.callback(close_all, descriptors)
            mapper = DeviceMapper(self._device)
            self._mapped = mapper.map(descriptors, self._size_bytes, self._identity.device)
        _log.info("%d bytes of weights are mapped (weights.memory)", self._size_bytes)
        return self._read(progress, fills=False)

    def _make(self, lock: WeightsLock, progress: Callable[[float], None]) -> CudaWeights:
        pages = DevicePages(self._size_bytes, self._device)
        self._mapped = pages
        made = self._read(progress, fills=True)
        cp.cuda.get_current_stream().synchronize()
        pages.protect()
        lock.commit(pages.descriptors()[0])
        _log.info("%d bytes of weights are made for all engines of the GPU (weights.memory)", self._size_bytes)
        return made

    def _read(self, progress: Callable[[float], None], *, fills: bool) -> CudaWeights:
        self._layout.begin()
        return load_cuda_weights(
            self._directory, self._config, self._element_type, progress, place=self._place, fills=fills
        )

    def _place(self, shape: Shape, dtype: Any) -> Array:
        """Return the array of the next matrix."""
        assert self._mapped is not None
        size_bytes = prod(shape) * cp.dtype(dtype).itemsize
        address = self._mapped.address + self._layout.take(size_bytes)
        memory = cp.cuda.UnownedMemory(address, size_bytes, self._mapped, self._device)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))
