"""Captures decode steps as CUDA graphs: a step is one launch, while single launches of its kernels take milliseconds.

rows of a step    1   2   3   4   5 … 8   9 … 16
rows of a graph   1   2   4   4     8       16        the other rows are padding, which leaves no trace

A row is a token with its history. So a sequence of which a few tokens are left to compute, as after a prompt that was
found in the cache, can have a row for each: all rows' keys and values are written before any row attends.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from services.worker.contracts.runner import Work
from services.worker.native.cuda.buffers import Buffers
from services.worker.native.cuda.decoder import CudaDecoder
from services.worker.native.cuda.layout import StepLayout
from services.worker.native.linear import Array
from services.worker.transfer.cuda import Stream

MOST_TOKENS = 16
"""The most tokens of a sequence in a graph's step."""
MOST_READ_AGAIN = 1 << 18
"""The most positions that are read more than once, because rows of one sequence attend by themselves; of all sequences
together. On an H100 with an 8B model, the last 16 of 8,192 tokens next to 8 decodes took 9.1 ms as rows of a graph, and
17.2 ms as a tile in single launches; one token took 8.5 ms."""


class DecodeGraphs:
    """A graph for each of `rows`, which ascend, once it is captured."""

    def __init__(
        self,
        decoder: CudaDecoder,
        buffers: Buffers,
        stream: Stream,
        layout: StepLayout,
        rows: Sequence[int],
        *,
        lower_bound: int,
    ) -> None:
        """Make graphs for `stream`, none of which is captured yet. A step of fewer works than `lower_bound` is not
        padded."""
        self._decoder = decoder
        self._buffers = buffers
        self._stream = stream
        self._rows = tuple(rows)
        self._lower_bound = lower_bound
        self._layout = layout
        self._graphs: dict[int, tuple[Any, Array]] = {}

    def capture_all(self, progress: Callable[[float], None]) -> None:
        """Capture all graphs on the current stream; `progress` is called with the share that is done."""
        for done, rows in enumerate(self._rows, 1):
            self.capture(rows)
            progress(done / len(self._rows))

    def rows_for(self, works: Sequence[Work]) -> int:
        """Return the rows of the graph that can run these works; 0 if there is none."""
        if not self._rows or len(works) > self._rows[-1]:
            return 0
        rows = len(works)
        if any(work.end - work.start > 1 or not work.draws for work in works):
            rows = _rows_with_tails(works)
        if not self._lower_bound <= rows <= self._rows[-1]:
            return 0
        return self._rows[bisect_left(self._rows, rows)]

    def capture(self, rows: int) -> None:
        """Capture the graph of these rows on the current stream, if it is not there. It overwrites the buffers' `ints`
        and takes as long as some steps, 30 ms for an 8B model on an H200."""
        if rows not in self._graphs:
            self._graphs[rows] = self._captured(rows)

    def launch(self, rows: int) -> Array:
        """Launch a step of the rows in the buffers' `ints`; return its logits."""
        graph, logits = self._graphs[rows]
        graph.launch(self._stream)
        return logits

    def _captured(self, rows: int) -> tuple[Any, Array]:
        """Capture a decode step of `rows` rows, of any lengths; return the graph and its logits."""
        padding = self._layout.lay_out_padding(rows)
        counts = padding.counts
        # The first run is not captured: it loads kernels and lets cuBLAS choose its own, which a capture must not do.
        self._buffers.ints[: len(padding.ints)].set(padding.ints)
        self._decoder.step(counts)
        with _collector_off():
            self._stream.begin_capture()
            logits = self._decoder.step(counts)
            graph = self._stream.end_capture()
        graph.upload(self._stream)  # otherwise its first launch would allocate memory
        return graph, logits


def _rows_with_tails(works: Sequence[Work]) -> int:
    """Return the rows of works of which some compute several tokens; 0 if they do not fit a graph."""
    rows = read_again = 0
    for work in works:
        count = work.end - work.start
        if count > MOST_TOKENS or not work.draws or work.lora or work.scoring:
            return 0  # a graph has its rows in another order than `prompt_logprobs.scored_rows`
        rows += count
        read_again += (count - 1) * work.end
    return rows if read_again <= MOST_READ_AGAIN else 0


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's collector off while a stream is captured.

    It could free an array at any line. CUDA would put a free on that stream into the graph, or refuse it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
