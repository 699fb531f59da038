"""Sums of hidden states on the device, which native/pooling.py makes embeddings of.

    hidden states of a step ─▶ final RMSNorm of all rows ─▶ sums, one a span ─▶ pinned memory: whoever has waited

Behind the norm they are of the element type, as for the logits. The kernel reads the spans and writes the sums in
pinned memory itself, for drawing.py's reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.cuda.decoder import CudaDecoder
from services.worker.native.pooling import RowSpan, Sums


class Pooling:
    """Of one decoder's steps, of at most so many spans. Not for two threads."""

    def __init__(self, decoder: CudaDecoder, most_spans: int, width: int) -> None:
        self._decoder = decoder
        self._spans = pinned_array(2 * most_spans, np.int32)
        self._sums = pinned_array(most_spans * width, np.float64).reshape(most_spans, width)
        self._spans_at, self._sums_at = kernel_address(self._spans), kernel_address(self._sums)

    def begin(self, spans: Sequence[RowSpan]) -> None:
        """Enqueue, behind the step whose rows these are, in order. The step before has been waited for."""
        assert len(spans) <= len(self._sums), f"{len(spans)} spans of a step"
        if spans:
            self._spans[: 2 * len(spans)] = [number for span in spans for number in (span.first, span.count)]
            rows = spans[-1].first + spans[-1].count
            self._decoder.pool(rows, len(spans), self._spans_at, self._sums_at)

    def sums(self, spans: Sequence[RowSpan]) -> Sums:
        """Of those begun, once the stream has come so far."""
        return np.array(self._sums[: len(spans)])
