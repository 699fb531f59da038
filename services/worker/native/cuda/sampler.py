"""Draws and rates tokens on the device, as native/sampler.py does on a CPU.

    begin   settings, biases, new tokens of the histories ─▶ pinned memory    while the step is computed
               └─▶ count_tokens, choose, choose_special, score                unless masks of grammars are to come
    end     masks ─▶ pinned memory ─▶ the same kernels                        if they were
               └─▶ wait ─▶ pinned memory: tokens, log-probabilities

The kernels read and write the pinned memory themselves. Copies of these few bytes would wait in the copy engines until
blocks on their way to the pool are copied, which made a step three times as long.

`choose` draws for rows that need only a temperature, `choose_special` for all others; rows of one step may be of both
kinds. What the device keeps of a sequence from step to step is its count of tokens, in a slot, if it has penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Drawn, Work
from services.worker.limits import MAX_BIASES, MAX_TOP_LOGPROBS
from services.worker.native.cuda.buffers import kernel_address, pinned_array
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.linear import Array
from services.worker.native.masks import NO_MASKS, Masks
from services.worker.native.sampler import GREEDY_BELOW, NO_TOKEN, allowed_now, has_penalty, is_plain
from services.worker.transfer.cuda import Stream
from shared.messages.frames import TokenLogprob
from shared.messages.generate import Sampling

_THREADS = 1024
_ROW = np.dtype(
    [
        *((name, np.uint64) for name in ("seed", "draw")),
        *((name, np.float64) for name in ("top_p", "repetition", "presence", "frequency")),
        *((name, np.float32) for name in ("coldness", "min_p")),
        *((name, np.int32) for name in ("special", "top_k", "first", "biased", "slot", "mask")),
    ],
    align=True,
)
"""`Row` of kernels/choose.cu."""
_NEWS = np.dtype([(name, np.int32) for name in ("slot", "fresh", "first", "size", "prompt")])
"""`News` of kernels/choose.cu."""
_ALL = 0xFFFFFFFF
_NEW_TOKENS = 1 << 18
"""The most tokens that one launch counts."""


class _Kept(Struct):
    """What is kept of a sequence as long as it is in every step."""

    sampling: Sampling
    ids: NDArray[np.int32]
    """The tokens with biases."""
    biases: NDArray[np.float32]
    slot: int = -1
    """Its counts on the device; -1 if it has no penalties."""
    counted: int = 0
    """How many tokens of its history the slot has."""


class CudaSampler:
    """Draws tokens on one stream and waits for it. Only one thread may use it."""

    def __init__(self, kernels: Kernels, stream: Stream, room: Array, counts: Array, settings: CudaConfig) -> None:
        """Allocate pinned memory. `room`, float32, and `counts`, int32, are (rows, vocab) of the largest step."""
        most_rows, vocab = room.shape
        self._kernels = kernels
        self._stream = stream
        self._room = room
        self._counts = counts
        self._vocab = np.int32(vocab)
        self._done = cp.cuda.Event(block=not settings.busy_wait_events, disable_timing=True)
        """The event of a step's end; `busy_wait_events` says whether a thread spins or sleeps until then."""
        self._rows = pinned_array(most_rows, _ROW)
        self._news = pinned_array(most_rows, _NEWS)
        self._biased = pinned_array(most_rows * MAX_BIASES, np.int32)
        """The tokens with biases of all rows, one row's after another's."""
        self._biases = pinned_array(most_rows * MAX_BIASES, np.float32)
        self._new_ids = pinned_array(_NEW_TOKENS, np.int32)
        words = -(-vocab // 32)
        self._masks = pinned_array(most_rows * words, np.uint32).reshape(most_rows, words)
        self._tokens = pinned_array(most_rows, np.int32)
        self._rated = pinned_array(2 * most_rows, np.int32).reshape(2, most_rows)
        """Rows that are rated, and how many likeliest tokens of each."""
        self._logprobs = pinned_array(most_rows, np.float32)
        self._top_ids = pinned_array(most_rows * MAX_TOP_LOGPROBS, np.int32)
        self._top_logprobs = pinned_array(most_rows * MAX_TOP_LOGPROBS, np.float32)
        self._kept: dict[int, _Kept] = {}
        """By `Work.sequence`, of the sequences of the last step that are not plain."""
        self._slots = list(range(most_rows))
        """Slots of `_counts` that no sequence has."""
        self._works: Sequence[Work] = ()
        self._logits: Array = None
        self._special: list[int] = []
        self._masked: list[int] = []
        """Special rows that have a mask."""
        self._launched = False
        self._copies: Stream = None
        """The stream that copies tokens to the host; None if the kernel writes them there itself."""
        if settings.output_copy_stream:
            self._copies = cp.cuda.Stream(non_blocking=True)
            self._chosen = cp.cuda.Event(disable_timing=True)
            self._on_device = cp.empty(most_rows, cp.int32)

    def begin(self, logits: Array, works: Sequence[Work]) -> None:
        """Begin to draw one token for each row of logits (works, vocab), float32, which the stream may still compute.

        They are the tokens that native/sampler.py draws, unless the random number, or the mass that top_p keeps, is
        within rounding of the border of two tokens. A row with a logit that is not finite gets an error instead of a
        token. No device memory is allocated.
        """
        self._works, self._logits, self._launched = works, logits, False
        samplings = [work.sampling for work in works]
        rows = self._rows[: len(works)]
        rows["seed"] = [one.seed for one in samplings]
        rows["draw"] = [work.draw_index for work in works]
        rows["coldness"] = [1 / one.temperature if one.temperature >= GREEDY_BELOW else 0.0 for one in samplings]
        vocab = int(self._vocab)
        self._special = [row for row, work in enumerate(works) if not is_plain(work, vocab)]
        rows["special"] = 0
        self._masked = []
        if self._special:
            self._lay_out([works[row] for row in self._special])
        elif self._kept:
            self._forget({})
        if not any(samplings[row].grammar for row in self._special):
            self._launch(NO_MASKS)

    def end(self, masks: Masks = NO_MASKS) -> list[Drawn]:
        """Wait for the tokens that `begin` began to draw, and return them. `masks` has those of all grammars."""
        if not self._launched:
            self._launch(masks)
        self._wait(self._stream if self._copies is None else self._copies)
        works, self._works, self._logits = self._works, (), None
        tokens = self._tokens[: len(works)].tolist()
        drawn = [Drawn(token) if token >= 0 else NO_TOKEN for token in tokens]
        rated = [row for row, work in enumerate(works) if work.sampling.logprobs >= 0]
        if rated:
            for row, logprob in zip(rated, self._logprobs_of(rated, works), strict=True):
                if tokens[row] >= 0:
                    drawn[row] = Drawn(tokens[row], logprob)
        for row in self._special if masks.failed else ():
            if works[row].sequence in masks.failed and tokens[row] >= 0:
                drawn[row] = Drawn(tokens[row], error=masks.failed[works[row].sequence])
        return drawn

    def wait(self) -> None:
        """Wait until the stream has done its work so far."""
        self._wait(self._stream)

    def score(self, logits: Array, tokens: NDArray[np.int32], count: int) -> tuple[Array, Array, Array]:
        """Rate one token for each row of logits (rows, vocab), as `logprobs.score` does, and wait for it.

        The results are float32, and in host memory. There are at most as many rows as draw in a step. Not between
        `begin` and `end`.
        """
        rows, count = len(tokens), min(count, int(self._vocab))
        self._tokens[:rows] = tokens
        self._rated[0, :rows], self._rated[1, :rows] = range(rows), count
        self._rate(logits, kernel_address(self._tokens), rows, count)
        self.wait()
        top, top_logprobs = (one[: rows * count].reshape(rows, count) for one in (self._top_ids, self._top_logprobs))
        return self._logprobs[:rows].copy(), top.copy(), top_logprobs.copy()

    # --- settings

    def _lay_out(self, works: Sequence[Work]) -> None:
        """Write the settings of the special rows, and count the new tokens of those that have penalties."""
        special, samplings = self._special, [work.sampling for work in works]
        kept = {work.sequence: self._kept_of(work) for work in works}
        self._forget(kept)
        rows, fields = self._rows, dict[str, list[Any]]()
        fields["special"] = [1] * len(works)
        fields["top_k"] = [one.top_k if one.top_k < self._vocab else 0 for one in samplings]
        fields["top_p"] = [one.top_p for one in samplings]
        fields["min_p"] = [one.min_p for one in samplings]
        fields["presence"] = [one.presence_penalty for one in samplings]
        fields["frequency"] = [one.frequency_penalty for one in samplings]
        fields["repetition"] = [one.repetition_penalty for one in samplings]
        self._masked = [
            row
            for row, work in zip(special, works, strict=True)
            if work.sampling.grammar or work.sampling.allowed_tokens or work.barred_now
        ]
        rows["mask"][special] = -1
        rows["mask"][self._masked] = self._masked
        self._count(works, kept)
        own = [kept[work.sequence] for work in works]
        fields["slot"] = [one.slot for one in own]
        fields["first"], fields["biased"] = self._list_biases(own), [len(one.ids) for one in own]
        for name, values in fields.items():
            rows[name][special] = values

    def _list_biases(self, kept: Sequence[_Kept]) -> list[int]:
        """Write the biases of some rows; return where each row's begin."""
        ends = np.cumsum([len(own.ids) for own in kept])
        if ends[-1]:
            self._biased[: ends[-1]] = np.concatenate([own.ids for own in kept])
            self._biases[: ends[-1]] = np.concatenate([own.biases for own in kept])
        return [0, *ends[:-1].tolist()]

    def _count(self, works: Sequence[Work], kept: dict[int, _Kept]) -> None:
        """Count the tokens that the slots do not have yet, in turns for which there is room."""
        news: list[tuple[int, int, int, int, int]] = []
        at = 0
        for work in works:
            if not has_penalty(work.sampling):
                continue
            own = kept[work.sequence]
            fresh = own.slot < 0
            if fresh:
                own.slot, own.counted = self._slots.pop(), 0
            while own.counted < work.end:
                if at == _NEW_TOKENS or len(news) == len(self._news):
                    self._launch_count(news)
                    self.wait()
                    news, at = [], 0
                size = min(work.end - own.counted, _NEW_TOKENS - at)
                self._new_ids[at : at + size] = work.history[own.counted : own.counted + size]
                prompt = min(size, max(0, work.prompt_tokens - own.counted))
                news.append((own.slot, fresh, at, size, prompt))
                own.counted += size
                at, fresh = at + size, False
        if news:
            self._launch_count(news)

    def _kept_of(self, work: Work) -> _Kept:
        """Return what is kept of a sequence. If it has other settings than before, that is nothing yet."""
        own, sampling = self._kept.get(work.sequence), work.sampling
        if own is not None and own.sampling is sampling:
            return own
        tokens, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        return _Kept(sampling, np.array(tokens, np.int32), np.array(biases, np.float32))

    def _forget(self, kept: dict[int, _Kept]) -> None:
        """Free the slots of what `kept` does not have."""
        gone = (own for sequence, own in self._kept.items() if kept.get(sequence) is not own)
        self._slots += [own.slot for own in gone if own.slot >= 0]
        self._kept = kept

    # --- launches

    def _launch_count(self, news: Sequence[tuple[int, int, int, int, int]]) -> None:
        self._news[: len(news)] = news
        arguments = (self._counts, kernel_address(self._news), kernel_address(self._new_ids), self._vocab)
        self._kernels.count_tokens((len(news),), (_THREADS,), arguments)

    def _launch(self, masks: Masks) -> None:
        """Launch the kernels that draw and rate."""
        self._launched = True
        works, count = self._works, len(self._works)
        for row in self._masked:
            self._write_mask(row, masks)
        tokens = kernel_address(self._tokens) if self._copies is None else self._on_device
        rows = kernel_address(self._rows)
        if len(self._special) < count:
            self._kernels.choose((count,), (_THREADS,), (tokens, self._logits, rows, self._vocab))
        if self._special:
            lists = (kernel_address(self._biased), kernel_address(self._biases))
            arguments = (tokens, self._logits, self._room, rows, *lists, self._counts, kernel_address(self._masks))
            self._kernels.choose_special((count,), (_THREADS,), (*arguments, self._vocab))
        rated = [(row, work.sampling.logprobs) for row, work in enumerate(works) if work.sampling.logprobs >= 0]
        if rated:
            self._rated[:, : len(rated)] = np.array(rated, np.int32).T
            np.minimum(self._rated[1], self._vocab, out=self._rated[1])
            self._rate(self._logits, tokens, len(rated), MAX_TOP_LOGPROBS)
        if self._copies is not None:
            self._chosen.record(self._stream)
            self._copies.wait_event(self._chosen)
            to, kind = int(kernel_address(self._tokens)), runtime.memcpyDeviceToHost
            runtime.memcpyAsync(to, self._on_device.data.ptr, 4 * count, kind, self._copies.ptr)

    def _rate(self, logits: Array, tokens: Any, rows: int, most: int) -> None:
        """Launch `score` for the first `rows` of `_rated`."""
        out = tuple(kernel_address(one) for one in (self._logprobs, self._top_ids, self._top_logprobs))
        which = tuple(kernel_address(one) for one in self._rated)
        self._kernels.score((rows,), (_THREADS,), (*out, logits, tokens, *which, np.int32(most), self._vocab))

    def _write_mask(self, row: int, masks: Masks) -> None:
        """Write which tokens a row may draw."""
        work, mask = self._works[row], self._masks[row]
        if work.sequence in masks.allowed or work.sampling.allowed_tokens:
            bits = np.packbits(allowed_now(work, masks, int(self._vocab)), bitorder="little")
            mask.view(np.uint8)[: len(bits)] = bits
            return
        mask[:] = _ALL
        if len(work.barred_now) < self._vocab:
            for token in work.barred_now:
                mask[token >> 5] &= _ALL ^ (1 << (token & 31))

    def _wait(self, on: Stream) -> None:
        self._done.record(on)
        self._done.synchronize()

    def _logprobs_of(self, rated: Sequence[int], works: Sequence[Work]) -> list[TokenLogprob]:
        """Return what `score` has written for the rated rows."""
        own = self._logprobs[: len(rated)].tolist()
        shape = len(rated), MAX_TOP_LOGPROBS
        ids = self._top_ids[: len(rated) * MAX_TOP_LOGPROBS].reshape(shape)
        top = self._top_logprobs[: len(rated) * MAX_TOP_LOGPROBS].reshape(shape).tolist()
        counts = [min(works[row].sampling.logprobs, int(self._vocab)) for row in rated]
        return [TokenLogprob(own[n], ids[n, :count].tobytes(), tuple(top[n][:count])) for n, count in enumerate(counts)]
