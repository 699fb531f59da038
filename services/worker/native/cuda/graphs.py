"""Decode steps as CUDA graphs: a whole step is one launch, where its kernels one by one cost the CPU milliseconds.

rows of a step    1   2   3   4   5 … 8   9 … 16
the graph's       1   2   4   4     8       16        the rest is padding, which leaves no trace
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from services.worker.native.cuda.buffers import Buffers
from services.worker.native.cuda.decoder import CudaDecoder
from services.worker.native.cuda.layout import StepCounts
from services.worker.native.linear import Array
from services.worker.runner import Work
from services.worker.transfer.cuda import Stream

_TYPICAL_CONTEXT = 4096
"""What a graph's attention is cut for; it serves any."""


class DecodeGraphs:
    """One for each of `rows`, ascending."""

    def __init__(
        self,
        decoder: CudaDecoder,
        buffers: Buffers,
        stream: Stream,
        rows: Sequence[int],
        *,
        lower_bound: int,
        context_length: int,
        progress: Callable[[float], None],
    ) -> None:
        """Captures all of them on `stream`, the current one; `progress` is progress the share that is done. A step of
        fewer works than `lower_bound` is not padded."""
        self._decoder = decoder
        self._buffers = buffers
        self._stream = stream
        self._rows = tuple(rows)
        self._lower_bound = lower_bound
        self._longest = min(context_length, _TYPICAL_CONTEXT)
        self._graphs: dict[int, tuple[Any, Array]] = {}
        for done, count in enumerate(self._rows, 1):
            self._graphs[count] = self._captured(count)
            progress(done / len(self._rows))

    def rows_for(self, works: Sequence[Work]) -> int:
        """Of the graph that takes these works; 0: none."""
        if not self._rows or not self._lower_bound <= len(works) <= self._rows[-1]:
            return 0
        if any(work.end - work.start > 1 or not work.draws for work in works):
            return 0
        return self._rows[bisect_left(self._rows, len(works))]

    def launch(self, rows: int) -> Array:
        """A step of what lies in the buffers' `ints`; its logits."""
        graph, logits = self._graphs[rows]
        graph.launch(self._stream)
        return logits

    def _captured(self, rows: int) -> tuple[Any, Array]:
        """The graph of a decode step of so many rows, of any lengths, and where its logits are."""
        counts = StepCounts(rows, rows, rows, 0, self._longest)
        # All padding. First without a capture: the kernels are loaded and cuBLAS chooses, which a capture must not do.
        padding = np.zeros(6 * rows, np.int32)
        padding[rows : 3 * rows] = -1
        padding[4 * rows :] = np.tile(np.arange(rows), 2)
        self._buffers.ints[: len(padding)].set(padding)
        self._decoder.step(counts)
        with _collector_off():
            self._stream.begin_capture()
            logits = self._decoder.step(counts)
            graph = self._stream.end_capture()
        graph.upload(self._stream)  # or its first launch would take memory
        return graph, logits


@contextmanager
def _collector_off() -> Iterator[None]:
    """While a stream is captured, nothing may be freed on it: CUDA would put that into the graph, or refuse it. And
    Python's collector frees arrays in garbage at any line."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
