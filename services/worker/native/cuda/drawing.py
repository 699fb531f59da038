"""Tokens from logits on the device: one kernel for what most requests ask, sampler.py on CuPy for the rest.

seeds, numbers of the draws, temperatures ─▶ device ─▶ choose ─▶ tokens ─▶ pinned memory ─▶ whoever waits
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.config import CudaConfig
from services.worker.engine import Drawn, Work
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.cuda.pinned import pinned
from services.worker.native.linear import Array
from services.worker.native.sampler import sample
from services.worker.transfer.cuda import Stream
from shared.errors import ModelError
from shared.messages import Sampling

_THREADS = 1024
_TO_DEVICE, _TO_HOST = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
_GREEDY_BELOW = 1e-5
"""As in sampler.py."""
_ROW_BYTES = 20
"""A seed, a draw's number, and one over the temperature."""


class Drawing:
    """Draws on one stream, of at most so many rows at once, and waits for what runs there. Not for two threads."""

    def __init__(self, kernels: Kernels, stream: Stream, most_rows: int, settings: CudaConfig) -> None:
        """What it needs on the device is allocated here."""
        self._kernels = kernels
        self._stream = stream
        self._copies = cp.cuda.Stream(non_blocking=True) if settings.output_copy_stream else stream
        """On which tokens leave the device."""
        self._chosen = cp.cuda.Event(disable_timing=True)
        self._done = cp.cuda.Event(block=not settings.busy_wait_events, disable_timing=True)
        """Whoever waits for it sleeps, or spins on a core."""
        self._staged = pinned(most_rows * _ROW_BYTES, np.uint8)
        self._numbers = cp.empty(most_rows * _ROW_BYTES, cp.uint8)
        self._tokens = cp.empty(most_rows, cp.int32)
        self._landed = pinned(most_rows, np.int32)
        places = ((0, 8, np.uint64), (8, 16, np.uint64), (16, _ROW_BYTES, np.float32))
        self._on_host, self._on_device = (
            [numbers[begin * most_rows : end * most_rows].view(kind) for begin, end, kind in places]
            for numbers in (self._staged, self._numbers)
        )
        """Seeds, numbers of the draws, and 1 / temperature or 0."""
        self._staged_at, self._landed_at = self._staged.ctypes.data, self._landed.ctypes.data

    def draw(self, logits: Array, works: Sequence[Work]) -> list[Drawn]:
        """Draw one token a row of logits (works, vocab), float32; waits for it.

        The same tokens as `sample`'s but where the drawn number lies within rounding of the border of two tokens. Only
        rows that are left to `sample` allocate anything. Raises ModelError where a logit is not a number.
        """
        vocab = logits.shape[1]
        special = [row for row, work in enumerate(works) if not _is_plain(work.sampling, vocab)]
        if len(special) == len(works):
            return sample(cp, logits, works)
        count, stream = len(works), self._stream
        seeds, draws, coldness = self._on_host
        seeds[:count] = [work.sampling.seed for work in works]
        draws[:count] = [work.draw_index for work in works]
        coldness[:count] = [_coldness(work.sampling.temperature) for work in works]
        runtime.memcpyAsync(self._numbers.data.ptr, self._staged_at, self._staged.nbytes, _TO_DEVICE, stream.ptr)
        seeds, draws, coldness = self._on_device
        arguments = (self._tokens, logits, coldness, seeds, draws, np.int32(vocab))
        self._kernels.choose((count,), (_THREADS,), arguments)
        if self._copies is not stream:
            self._chosen.record(stream)
            self._copies.wait_event(self._chosen)
        runtime.memcpyAsync(self._landed_at, self._tokens.data.ptr, 4 * count, _TO_HOST, self._copies.ptr)
        self._wait(self._copies)
        chosen = self._landed[:count].tolist()
        if min(chosen) < 0:
            raise ModelError("the model computed logits that are not finite numbers")
        drawn = [Drawn(token) for token in chosen]
        if special:
            for row, one in zip(special, sample(cp, logits[special], [works[row] for row in special]), strict=True):
                drawn[row] = one
        return drawn

    def wait(self) -> None:
        """Until the stream has come so far."""
        self._wait(self._stream)

    def _wait(self, on: Stream) -> None:
        self._done.record(on)
        self._done.synchronize()


def _coldness(temperature: float) -> float:
    return 1 / temperature if temperature >= _GREEDY_BELOW else 0.0


def _is_plain(sampling: Sampling, vocab: int) -> bool:
    """Greedy, or drawn from the model's own distribution at some temperature."""
    filtered = 0 < sampling.top_k < vocab or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if sampling.temperature < _GREEDY_BELOW:
        filtered = False
    penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    return not (filtered or penalised or sampling.logprobs >= 0)
