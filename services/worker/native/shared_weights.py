"""SharedWeights: a model's float32 weights as one file in the machine's memory service.

    ask the service ──▶ committed: map them
          │        └──▶ none has made them: convert into memory of our own, seal it, commit it; others map it
          └── no service, no answer, no room ──▶ convert on the disk, as without a service, and say so in one line

The file is what `prepare` writes to the disk: its tensors are used in place, and the digest of its weights is the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.memory.client import NoSharedWeights, WeightsLock
from services.worker.memory.messages import MOST_NAME, WeightsIdentity
from services.worker.native.prepare import (
    WEIGHTS,
    Progress,
    WeightsSource,
    open_source,
    prepare,
    prepare_files,
    source_key,
)
from services.worker.native.tensor_file import Floats, TensorLayout, write_tensors
from services.worker.sharing.host_pages import IMMUTABLE, memory_fault, memory_file, seal_memory
from services.worker.sharing.packets import close_all

WRITER_WAIT_S = 1800.0
"""Seconds that an engine waits for another one that converts the same weights. Afterwards it converts them itself."""

_log = logging.getLogger(__name__)


class SharedWeights:
    """The weights of one engine. It belongs to one thread."""

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        """Find out which weights the model has; nothing is mapped before `acquire`. Raise ModelError."""
        self._source, self._cache = Path(settings.model), Path(settings.cache)
        self._service, self._timeout_s = Path(settings.weights.memory), settings.weights.timeout_s
        self._name = (settings.model_name or self._source.name)[:MOST_NAME]
        self._progress = progress
        self.directory = prepare_files(self._source, self._cache)
        """The model's directory, with config and tokenizer."""
        self.in_place = open_source(self._source, self.directory).in_place
        """Whether the directory's own files have float32 weights, so that there is nothing to convert."""
        self.file: Path | None = None
        """The file that has the weights. None if the directory's own files have them, and before `acquire`."""
        self._lock: WeightsLock | None = None
        self._descriptor = -1

    @property
    def file_of_ranks(self) -> Path | None:
        """The file, as further ranks can open it while this process has it."""
        return self.file if self._descriptor < 0 else Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def acquire(self) -> None:
        """Map the weights, or make them. Raise ModelError."""
        if self.in_place or self.file is not None:
            return
        try:
            self._acquire_shared()
        except NoSharedWeights as wrong:
            _log.warning("this engine reads its weights by itself: %s", wrong)
            self.file = prepare(self._source, self._cache, self._progress) / WEIGHTS

    def release(self) -> None:
        """Let go of the weights, which nothing uses any more. `acquire` may follow."""
        self.file = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire_shared(self) -> None:
        """Map the weights that the service has, or give it some. Raise NoSharedWeights and ModelError."""
        source = open_source(self._source, self.directory)
        layout = TensorLayout(source.shapes)
        identity = WeightsIdentity(source_key(self._source), layout.digest)
        with ExitStack() as undo:
            lock = WeightsLock(self._service, identity, layout.size_bytes, self._timeout_s)
            undo.callback(lock.close)
            descriptors = lock.ask(self._name, WRITER_WAIT_S, self._waits)
            found = descriptors is not None
            if descriptors is None:
                descriptors = [self._make(source, layout)]
                undo.callback(close_all, descriptors)
                lock.commit(descriptors[0])
            else:
                undo.callback(close_all, descriptors)
                self._check(descriptors, layout)
            undo.pop_all()
        self._lock, self._descriptor = lock, descriptors[0]
        self.file = Path(f"/proc/self/fd/{self._descriptor}")
        done = "mapped" if found else "converted, for all engines of this machine"
        _log.info("%d bytes of weights are %s (weights.memory)", layout.size_bytes, done)

    def _waits(self) -> None:
        self._progress(Loading("waiting for another worker that converts the model", 0.0))

    def _make(self, source: WeightsSource, layout: TensorLayout) -> int:
        """Convert the weights; return the descriptor of their memory, which nothing can write to any more."""
        read = source.open()
        try:
            descriptor = memory_file("headrace-weights")
        except OSError as wrong:
            raise NoSharedWeights(f"weights.memory: no memory: {wrong.strerror}") from None
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                self._write(descriptor, source, read)
                seal_memory(descriptor, IMMUTABLE)
            except OSError as wrong:
                raise NoSharedWeights(f"weights.memory: {layout.size_bytes} bytes: {wrong.strerror}") from None
            undo.pop_all()
        return descriptor

    def _write(self, descriptor: int, source: WeightsSource, read: Callable[[str], Floats]) -> None:
        converting = f"converting {self._source.name} to float32"
        write_tensors(
            Path(f"/proc/self/fd/{descriptor}"),
            source.shapes,
            read,
            lambda share: self._progress(Loading(converting, share)),
        )

    def _check(self, descriptors: list[int], layout: TensorLayout) -> None:
        """Raise NoSharedWeights if what the service sent are not these weights, or others could change them."""
        fault = memory_fault(descriptors, layout.size_bytes, IMMUTABLE)
        if not fault and os.pread(descriptors[0], len(layout.head), 0) != layout.head:
            fault = "what lies there is laid out differently"
        if fault:
            raise NoSharedWeights(f"weights.memory, {self._service}: {fault}")


def shared_weights(settings: WorkerConfig, progress: Progress) -> SharedWeights | None:
    """Return the weights from the memory service that the settings name, mapped. None if they name none. Raise
    ModelError."""
    if not settings.weights.memory:
        return None
    weights = SharedWeights(settings, progress)
    weights.acquire()
    return weights
