"""SharedCudaWeights: a model's matrices on the GPU, in memory that its memory service keeps.

    ask the service ──▶ committed: import the handle, map it for reading
          │        └──▶ none has made them: allocate, fill, map for reading, export, commit
          └── no service, no answer, no room ──▶ memory of one's own, as without a service, and one line says so

The service needs no CUDA: a descriptor of the memory keeps it alive, also when the last engine is dead. What is CUDA's
own is a `MatrixMemory`, so that all of this also runs on host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from services.worker.config import WorkerConfig
from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.memory.messages import MOST_NAME, WeightsIdentity
from services.worker.native.cuda.weights_layout import WeightsLayout
from services.worker.native.linear import Array
from services.worker.native.prepare import source_key
from services.worker.native.shared_weights import WRITER_WAIT_S
from services.worker.sharing.memory import ExportedPages, MapFailed, MappedPages
from services.worker.sharing.packets import close_all
from services.worker.transfer.errors import DeviceFailed

_log = logging.getLogger(__name__)
W_co = TypeVar("W_co", covariant=True)
Progress = Callable[[float], None]
Place = Callable[[tuple[int, ...], type], Array]
"""Returns the array of the next matrix, of a shape and type."""


class WritablePages(ExportedPages, Protocol):
    """Memory of this process that it fills before others map it."""

    def protect(self) -> None:
        """Await all work on it. From now on this process only reads it."""
        ...


class MatrixMemory(Protocol[W_co]):
    """One device: its memory, and what loads weights into it."""

    device: str
    """The name of the device among all of the machine, such as a GPU's UUID."""
    page_bytes: int
    """Sizes of memory are multiples of this."""

    def allocate(self, size_bytes: int) -> WritablePages:
        """Return new memory. Raise DeviceFailed."""
        ...

    def map(self, descriptors: list[int], size_bytes: int) -> MappedPages:
        """Map the memory of another process for reading. Raise MapFailed."""
        ...

    def array(self, address: int, shape: tuple[int, ...], dtype: type) -> Array:
        """Return an array over memory that outlives it."""
        ...

    def item_bytes(self, dtype: type) -> int: ...

    def load(self, progress: Progress, place: Place | None, *, fills: bool) -> W_co:
        """Return the weights. `place` has the memory of each matrix; without it they take their own. Without `fills`
        the matrices are there already. Raise ModelError."""
        ...


class SharedCudaWeights(Generic[W_co]):
    """The matrices of one engine. It belongs to one thread."""

    def __init__(self, settings: WorkerConfig, layout: WeightsLayout, memory: MatrixMemory[W_co]) -> None:
        """Find out which weights the model has; nothing is mapped before `load`. Raise ModelError."""
        self._settings, self._layout, self._memory = settings, layout, memory
        self._size_bytes = -(-layout.size_bytes // memory.page_bytes) * memory.page_bytes
        self._identity = WeightsIdentity(source_key(Path(settings.model)), layout.digest, memory.device)
        self._lock: WeightsLock | None = None
        self._mapped: ExportedPages | MappedPages | None = None

    def load(self, progress: Progress = lambda _share: None) -> W_co:
        """Return the weights: mapped, made for all engines, or this engine's own. Raise ModelError,
        DeviceMemoryExhausted."""
        try:
            return self._load_shared(progress)
        except (NoSharedWeights, MapFailed, DeviceFailed) as wrong:
            self.release()
            _log.warning("this engine has weights of its own: %s", wrong)
            return self._memory.load(progress, None, fills=True)
        except BaseException:  # a full device has no room for weights of its own either
            self.release()
            raise

    def maps(self, address: int) -> bool:
        """Return whether an address lies in the weights that are mapped."""
        return self._mapped is not None and 0 <= address - self._mapped.address < self._size_bytes

    def release(self) -> None:
        """Unmap the weights, which no array has any more, and let the service free them once no other engine maps them.
        `load` may follow."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _load_shared(self, progress: Progress) -> W_co:
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
            self._mapped = self._memory.map(descriptors, self._size_bytes)
        _log.info("%d bytes of weights are mapped (weights.memory)", self._size_bytes)
        return self._place_all(progress, fills=False)

    def _make(self, lock: WeightsLock, progress: Progress) -> W_co:
        self._mapped = pages = self._memory.allocate(self._size_bytes)
        made = self._place_all(progress, fills=True)
        pages.protect()
        lock.commit(pages.descriptors()[0])
        _log.info("%d bytes of weights are made for all engines of the device (weights.memory)", self._size_bytes)
        return made

    def _place_all(self, progress: Progress, *, fills: bool) -> W_co:
        self._layout.begin()
        return self._memory.load(progress, self._place, fills=fills)

    def _place(self, shape: tuple[int, ...], dtype: type) -> Array:
        assert self._mapped is not None
        item_bytes = self._memory.item_bytes(dtype)
        return self._memory.array(self._mapped.address + self._layout.take(shape, item_bytes), shape, dtype)
