"""Sums hidden states on the device; native/pooling.py makes embeddings of the sums.

    hidden states of a step ─▶ final RMSNorm of all rows ─▶ one sum for each span ─▶ pinned memory

After the norm the states have the element type, as for the logits. The kernel itself reads the spans from pinned memory
and writes the sums there, for the reason in sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.cuda.decoder import CudaDecoder
from services.worker.native.pooling import RowSpan, Sums


class Pooling:
    """The sums of one decoder's steps. Only one thread may use it."""

    def __init__(self, decoder: CudaDecoder, most_spans: int, width: int) -> None:
        self._decoder = decoder
        self._spans = pinned_array(2 * most_spans, np.int32)
        self._sums = pinned_array(most_spans * width, np.float64).reshape(most_spans, width)
        self._spans_at, self._sums_at = kernel_address(self._spans), kernel_address(self._sums)

    def begin(self, spans: Sequence[RowSpan]) -> None:
        """Enqueue the sums of these spans, in order of rows, after their step. The step before must have ended."""
        assert len(spans) <= len(self._sums), f"{len(spans)} spans of a step"
        if spans:
            self._spans[: 2 * len(spans)] = [number for span in spans for number in (span.first, span.count)]
            rows = spans[-1].first + spans[-1].count
            self._decoder.pool(rows, len(spans), self._spans_at, self._sums_at)

    def sums(self, spans: Sequence[RowSpan]) -> Sums:
        """Return the sums that `begin` enqueued, once the stream has done them."""
        return np.array(self._sums[: len(spans)])
