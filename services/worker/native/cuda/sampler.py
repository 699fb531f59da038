"""Tokens from logits on the device: one kernel for what most requests ask, sampler.py on CuPy for the rest.

    pinned memory: seeds, numbers of the draws, temperatures ─▶ choose ─▶ pinned memory: tokens ─▶ whoever waits

The kernel reads and writes the pinned memory itself. Copies of these few bytes would wait in the copy engines behind
blocks on their way to the pool: that made a step beside them three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import CudaConfig
from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.linear import Array
from services.worker.native.masks import NO_MASKS, Masks
from services.worker.native.sampler import GREEDY_BELOW, NO_TOKEN, is_plain, sample
from services.worker.runner import Drawn, Work
from services.worker.transfer.cuda import Stream

_THREADS = 1024
_SAMPLE_BYTES = 256 << 20
"""That `sample` takes of the device at most, half of `capacity.MARGIN_BYTES`; rows beyond go after the others."""
_LOGIT_BYTES = 64
"""That it takes for each logit where all filters are set: 41 on NumPy, and CuPy's sort takes more."""


class CudaSampler:
    """Draws on one stream, of at most so many rows at once, and waits for what runs there. Not for two threads."""

    def __init__(self, kernels: Kernels, stream: Stream, most_rows: int, settings: CudaConfig) -> None:
        self._kernels = kernels
        self._stream = stream
        self._done = cp.cuda.Event(block=not settings.busy_wait_events, disable_timing=True)
        """Whoever waits for it sleeps, or spins on a core."""
        self._seeds = pinned_array(most_rows, np.uint64)
        self._draws = pinned_array(most_rows, np.uint64)
        self._coldness = pinned_array(most_rows, np.float32)
        """1 / temperature, or 0."""
        self._tokens = pinned_array(most_rows, np.int32)
        self._addresses = [kernel_address(one) for one in (self._coldness, self._seeds, self._draws)]
        self._tokens_at = kernel_address(self._tokens)
        self._copies: Stream = None
        """On which tokens leave the device; None: the kernel writes them where they go."""
        if settings.output_copy_stream:
            self._copies = cp.cuda.Stream(non_blocking=True)
            self._chosen = cp.cuda.Event(disable_timing=True)
            self._on_device = cp.empty(most_rows, cp.int32)

    def draw(self, logits: Array, works: Sequence[Work], masks: Masks = NO_MASKS) -> list[Drawn]:
        """Draw one token a row of logits (works, vocab), float32; waits for it.

        The same tokens as `sample`'s but where the drawn number lies within rounding of the border of two tokens. Only
        rows that are left to `sample` allocate anything. A row with a logit that is not finite gets no token but the
        error.
        """
        vocab = logits.shape[1]
        special = [row for row, work in enumerate(works) if not is_plain(work.sampling, vocab)]
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
        """Until the stream has come so far."""
        self._wait(self._stream)

    def _wait(self, on: Stream) -> None:
        self._done.record(on)
        self._done.synchronize()


def _sampled(logits: Array, works: Sequence[Work], masks: Masks) -> list[Drawn]:
    """As `sample`, which draws each row as if it were alone, in turns that its memory has room for."""
    most = max(1, _SAMPLE_BYTES // (_LOGIT_BYTES * logits.shape[1]))
    turns = (slice(first, first + most) for first in range(0, len(works), most))
    return [drawn for turn in turns for drawn in sample(cp, logits[turn], works[turn], masks)]


def _coldness(temperature: float) -> float:
    return 1 / temperature if temperature >= GREEDY_BELOW else 0.0
