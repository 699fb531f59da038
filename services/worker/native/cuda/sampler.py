"""Draws tokens from logits on the device: a kernel for most requests, native/sampler.py on CuPy for the others.

    pinned memory: seeds, indices of the draws, temperatures ─▶ choose ─▶ pinned memory: tokens ─▶ the waiting thread

The kernel reads and writes the pinned memory itself. Copies of these few bytes would wait in the copy engines until
blocks on their way to the pool are copied, which made a step three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.linear import Array
from services.worker.native.masks import NO_MASKS, Masks
from services.worker.native.sampler import GREEDY_BELOW, NO_TOKEN, is_plain, sample
from services.worker.transfer.cuda import Stream

_THREADS = 1024
_SAMPLE_BYTES = 256 << 20
"""The most device memory that `sample` takes: half of `capacity.MARGIN_BYTES`. More rows are drawn in turns."""
_LOGIT_BYTES = 64
"""The bytes that `sample` takes for each logit with all filters: 41 on NumPy, and CuPy's sort takes more."""


class CudaSampler:
    """Draws tokens on one stream and waits for it. Only one thread may use it."""

    def __init__(self, kernels: Kernels, stream: Stream, most_rows: int, settings: CudaConfig) -> None:
        self._kernels = kernels
        self._stream = stream
        self._done = cp.cuda.Event(block=not settings.busy_wait_events, disable_timing=True)
        """The event of a step's end; `busy_wait_events` says whether a thread spins or sleeps until then."""
        self._seeds = pinned_array(most_rows, np.uint64)
        self._draws = pinned_array(most_rows, np.uint64)
        self._coldness = pinned_array(most_rows, np.float32)
        """1 / temperature of each row; 0 for a greedy row."""
        self._tokens = pinned_array(most_rows, np.int32)
        self._addresses = [kernel_address(one) for one in (self._coldness, self._seeds, self._draws)]
        self._tokens_at = kernel_address(self._tokens)
        self._copies: Stream = None
        """The stream that copies tokens to the host; None if the kernel writes them there itself."""
        if settings.output_copy_stream:
            self._copies = cp.cuda.Stream(non_blocking=True)
            self._chosen = cp.cuda.Event(disable_timing=True)
            self._on_device = cp.empty(most_rows, cp.int32)

    def draw(self, logits: Array, works: Sequence[Work], masks: Masks = NO_MASKS) -> list[Drawn]:
        """Draw one token for each row of logits (works, vocab), float32, and wait for the tokens.

        They are the tokens that `sample` draws, unless the random number is within rounding of the border of two
        tokens. Only rows that are left to `sample` allocate memory. A row with a logit that is not finite gets an error
        instead of a token.
        """
        vocab = logits.shape[1]
        special = [row for row, work in enumerate(works) if not is_plain(work, vocab)]
        if len(special) == len(works):
            return _sampled(logits, works, masks)
        count = len(works)
        self._seeds[:count] = [work.sampling.seed for work in works]
        self._draws[:count] = [work.draw_index for work in works]
        self._coldness[:count] = [_coldness(work.sampling.temperature) for work in works]
        tokens = self._tokens_at if self._copies is None else self._on_device
        self._kernels.choose((count,), (_THREADS,), (tokens, logits, *self._addresses, np.int32(vocab)))
        if self._copies is not None:
            self._chosen.record(self._stream)
            self._copies.wait_event(self._chosen)
            to, kind = int(self._tokens_at), runtime.memcpyDeviceToHost
            runtime.memcpyAsync(to, self._on_device.data.ptr, 4 * count, kind, self._copies.ptr)
        self._wait(self._stream if self._copies is None else self._copies)
        chosen = self._tokens[:count].tolist()
        drawn = [Drawn(token) if token >= 0 else NO_TOKEN for token in chosen]
        if special:
            others = _sampled(logits[special], [works[row] for row in special], masks)
            for row, one in zip(special, others, strict=True):
                drawn[row] = one
        return drawn

    def wait(self) -> None:
        """Wait until the stream has done its work so far."""
        self._wait(self._stream)

    def _wait(self, on: Stream) -> None:
        self._done.record(on)
        self._done.synchronize()


def _sampled(logits: Array, works: Sequence[Work], masks: Masks) -> list[Drawn]:
    """Call `sample` in turns for which there is memory; a row's token does not depend on the other rows."""
    most = max(1, _SAMPLE_BYTES // (_LOGIT_BYTES * logits.shape[1]))
    turns = (slice(first, first + most) for first in range(0, len(works), most))
    return [drawn for turn in turns for drawn in sample(cp, logits[turn], works[turn], masks)]


def _coldness(temperature: float) -> float:
    return 1 / temperature if temperature >= GREEDY_BELOW else 0.0
