"""Computes the decoder's step on the device, as native/decoder.py does on a CPU, with our kernels and cuBLAS.

    embed → for each layer: RMSNorm → q, k, v in one product → rotate, write KV → attend over paged KV → + product
                            RMSNorm → gate and up in one product → SwiGLU                              → + product
                                                                        → RMSNorm of drawing rows → logits (float32)
                                                                        → RMSNorm of all rows → sums (`pool`)

What a model has in addition follows from its ModelConfig, in kernels mostly by flags of their compilation.

Activations have the element type. The residual stream stays float32, and cuBLAS itself accumulates products in it: no
kernel adds, and nothing is rounded between layers. A rank of a tensor-parallel group has a part of each product's sum
or columns, and exchanges them with the others (`exchange.py`). All of it runs on one stream. Nothing here waits for the
device or, without LoRAs, allocates memory, so a step can be captured as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.native.config import ModelConfig
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.buffers import Buffers
from services.worker.native.cuda.exchange import DeviceExchange
from services.worker.native.cuda.hopper import page_map
from services.worker.native.cuda.kernels import Kernels
from services.worker.native.cuda.layout import StepCounts, sections
from services.worker.native.cuda.lora import DOWN, GATE_UP, OUTPUT, QKV, StepLoras
from services.worker.native.cuda.splits import DECODE_HEADS
from services.worker.native.cuda.weights import CudaLayer, CudaWeights
from services.worker.native.linear import Array
from services.worker.native.lora import LoraRows

_THREADS = 256
_ROW_WARPS = 8
"""Warps of a thread block of row_product.cu."""
_ROW_WARPS_WANTED = 20
"""Wanted warps on each multiprocessor; with 1 or 40, a step was 4 or 2 % slower on an H200."""
_MERGE_HEADS = 4
"""Query heads of a thread block of `merge_splits`. Most rows have nothing to merge, so thread blocks should be few."""
_NO_WINDOW = 1 << 30


class CudaDecoder:
    """Enqueues steps with a model's weights and KV pages. Only one thread may use it at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        pages: Array,
        kernels: Kernels,
        blas: Blas,
        buffers: Buffers,
        exchange: DeviceExchange | None = None,
    ) -> None:
        """Compute on `pages` (slots, layers, 2, block_size, kv_heads, head_dim) of the element type. With `exchange`
        all these are a rank's part."""
        self._config = config
        self._weights = weights
        self._pages = pages
        self._kernels = kernels
        self._blas = blas
        self._buffers = buffers
        self._exchange = exchange
        self._scale = config.attention_scale
        self._slot_stride = pages.size // pages.shape[0]
        prefill = kernels.attend_prefill
        self._prefill_pages = page_map(pages) if prefill is not None and prefill.mapped else pages
        self._layer_stride = self._slot_stride // config.layers
        self._processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
        self._turns = list(zip(buffers.cosines, buffers.sines, strict=True))
        """The tables of cosine and sine of each rotation."""
        self._group_tiles = -(-config.heads // config.kv_heads // DECODE_HEADS)

    def step(
        self, counts: StepCounts, loras: Sequence[LoraRows] = (), placed: Sequence[tuple[int, Array]] = ()
    ) -> Array:
        """Enqueue a step on the current stream: store its KV, and return its logits (drawing, vocab), float32.

        The logits lie where those of every step lie. The buffers' `ints` are what `StepLayout` made. `placed` has a
        first row, and the embeddings in host memory that stand in for those of the tokens from there on.
        """
        config, weights, kernels = self._config, self._weights, self._kernels
        added = StepLoras(config, self._blas, loras)
        room, at, rows, ints = self._buffers, sections(counts), counts.rows, self._buffers.ints
        assert rows <= room.hidden.shape[0], f"a step of {rows} rows"
        assert counts.drawing <= room.logits.shape[0], f"a step that draws {counts.drawing} tokens"
        hidden, normed, qkv = room.hidden[:rows], room.normed[:rows], room.qkv[:rows]
        attended, activated = room.attended[:rows], room.activated[:rows]
        logits = room.logits[: counts.drawing]
        positions, places = ints[at.positions :], ints[at.places :]
        scale = np.float32(config.embedding_scale)
        embedding = (hidden, weights.embedding, ints[at.tokens :], np.int32(config.hidden), scale)
        kernels.embed((rows,), (_THREADS,), embedding)
        for first, embeddings in placed:
            hidden[first : first + len(embeddings)].set(embeddings)
        for number, layer in enumerate(weights.layers):
            layer_offset, window = np.int64(number * self._layer_stride), config.window_of(number)
            self._norm(normed, hidden, None, layer.input_norm)
            self._product(qkv, normed, layer.qkv)
            added.add(qkv, normed, number, QKV)
            if config.query_norm == "whole":
                self._norm_whole(layer, qkv)
            self._rotate_and_store(layer, rows, positions, places, layer_offset, self._turns[config.rope_of(number)])
            self._attend(counts, layer_offset, window)
            bias = self._add(
                hidden, attended, layer.output, layer.output_bias, layer.attended_norm, number, OUTPUT, added
            )
            self._norm(normed, hidden, bias, layer.output_norm)
            self._activate(activated, normed, layer.gate_up, number, added)
            self._add(hidden, activated, layer.down, None, layer.fed_norm, number, DOWN, added)
        if counts.drawing:
            self._head(logits, hidden, ints[at.drawing :])
        return logits

    def logits(self, first: int, rows: int) -> Array:
        """Enqueue the logits (rows, vocab) of the last step's rows from `first` on, and return them.

        They lie where those of every step lie. There are at most as many rows as draw in a step."""
        logits = self._buffers.logits[:rows]
        self._head(logits, self._buffers.hidden[first : first + rows], self._buffers.every_row)
        return logits

    def _head(self, logits: Array, hidden: Array, which: Array) -> None:
        """Compute logits (rows, vocab) of the rows `which` of hidden states."""
        config, rows = self._config, logits.shape[0]
        normed = self._buffers.normed[:rows]
        self._norm(normed, hidden, None, self._weights.norm, which)
        if self._exchange is None:
            self._product(logits, normed, self._weights.head)
        else:
            self._product(self._exchange.own(logits), normed, self._weights.head)
            self._exchange.join(logits)
        if config.logit_scale != 1 or config.logit_cap:
            bending = (logits, np.int64(logits.size), np.float32(config.logit_scale), np.float32(config.logit_cap))
            self._kernels.bend((min(4096, -(-logits.size // _THREADS)),), (_THREADS,), bending)

    def pool(self, rows: int, spans: int, spans_at: np.uintp, sums_at: np.uintp) -> None:
        """Enqueue the sums of hidden states after the final norm. Call this after a step and before the next.

        `spans_at` has the spans (first row, rows) as int32, all within the step's first `rows`. `sums_at` gets the sums
        (spans, hidden) as float64. Both lie in pinned memory.
        """
        room, width = self._buffers, self._config.hidden
        normed = room.normed[:rows]
        self._norm(normed, room.hidden[:rows], None, self._weights.norm)
        arguments = (sums_at, normed, spans_at, np.int32(width))
        self._kernels.sum_rows((-(-width // _THREADS), spans), (_THREADS,), arguments)

    def _add(
        self,
        hidden: Array,
        x: Array,
        weight: Array,
        bias: Array | None,
        norm: Array | None,
        number: int,
        projections: Sequence[str],
        loras: StepLoras,
    ) -> Array | None:
        """Add a product to the residual stream, after its norm if there is one; `projections` are its names.

        Return the bias if the next norm must add it.
        """
        factor = self._config.residual_scale
        if norm is None and self._exchange is None:
            self._product(hidden, x, weight, add=True, factor=factor)
            loras.add(hidden, x, number, projections, factor)
            return bias
        added = self._buffers.added[: len(hidden)]
        self._product(added, x, weight)
        loras.add(added, x, number, projections)
        if norm is None:
            assert self._exchange is not None
            self._exchange.add_total(hidden, added, factor)
            return bias
        if self._exchange is not None:
            self._exchange.total(added)
        self._norm_floats(hidden, added, bias, norm, hidden.shape[1], factor=factor)
        return None

    def _norm_whole(self, layer: CudaLayer, qkv: Array) -> None:
        """Norm queries and keys in place, all heads of a row as one vector, after adding their biases."""
        assert layer.query_norm is not None, "the config says so"
        bias, first = layer.qkv_bias, 0
        for width in (self._config.queries, self._config.keys):
            columns = slice(first, first + width)
            part, weight = qkv[:, columns], layer.query_norm[columns]
            self._norm_floats(part, part, None if bias is None else bias[columns], weight, qkv.shape[1])
            first += width

    def _norm_floats(
        self, to: Array, x: Array, bias: Array | None, weight: Array, stride: int, factor: float = 0.0
    ) -> None:
        """Write the RMSNorm of x + bias to `to`; with a factor, add it there, times the factor."""
        width, epsilon = len(weight), np.float32(self._config.norm_epsilon)
        threads = min(1024, -(-width // 32) * 32)
        sizes = (np.int32(stride), np.int32(width), epsilon, np.int32(factor != 0), np.float32(factor))
        self._kernels.norm_floats((len(x),), (threads,), (to, x, _pointer(bias), weight, *sizes))

    def _norm(
        self, out: Array, hidden: Array, bias: Array | None, weight: Array | None, picked: Array | None = None
    ) -> None:
        """Norm rows of the residual stream for a product; without a weight only narrow them."""
        if weight is None:
            self._kernels.narrow_rows((out.shape[0],), (_THREADS,), (out, hidden, np.int32(self._config.hidden)))
            return
        width, epsilon = np.int32(self._config.hidden), np.float32(self._config.norm_epsilon)
        arguments = (out, hidden, _pointer(bias), weight, _pointer(picked), width, epsilon)
        pieces = -(-self._config.hidden // self._kernels.pack)
        threads = min(
            1024, -(-pieces // 32) * 32
        )  # one piece for each thread if possible, so that a row is waited for once
        self._kernels.rms_norm((out.shape[0],), (threads,), arguments)

    def _rotate_and_store(
        self,
        layer: CudaLayer,
        rows: int,
        positions: Array,
        places: Array,
        layer_offset: np.int64,
        turns: tuple[Array, Array],
    ) -> None:
        config, room, half = self._config, self._buffers, self._config.head_dim // 2
        pairs, threads = (config.heads + 2 * config.kv_heads) * half, _THREADS
        if config.query_norm == "heads":  # whole heads in a thread block
            threads = max(1, _THREADS // half) * half
        self._kernels.rotate_and_store(
            (rows, -(-pairs // threads)),
            (threads,),
            (
                room.q,
                room.q_rest,
                self._pages,
                room.qkv,
                _pointer(layer.qkv_bias),
                _pointer(layer.query_norm),
                *turns,
                positions,
                places,
                np.int64(self._slot_stride),
                layer_offset,
                np.int32(config.heads),
                np.int32(config.kv_heads),
                np.float32(config.norm_epsilon),
            ),
        )

    def _attend(self, counts: StepCounts, layer_offset: np.int64, window: int) -> None:
        config, room, kernels, at = self._config, self._buffers, self._kernels, sections(counts)
        ints, split_room = room.ints, room.split_room
        positions, starts, table = ints[at.positions :], ints[at.table_starts :], ints[at.tables :]
        stride, kv_heads = np.int64(self._slot_stride), np.int32(config.kv_heads)
        seen = np.int32(window or _NO_WINDOW)
        if kernels.attend_decode is None or kernels.merge_splits is None or kernels.attend_prefill is None:
            scale = np.float32(self._scale)
            paging = (room.every_row, positions, table, starts, stride, layer_offset, kv_heads, scale, seen)
            kernels.attend_any((config.heads, counts.rows), (128,), (room.attended, room.q, self._pages, *paging))
            return
        scale = np.float32(self._scale * math.log2(math.e))
        if counts.singles:
            floats_of_split = config.heads * config.head_dim
            assert counts.splits * (floats_of_split + 2 * config.heads) <= split_room.size, f"{counts.splits} splits"
            sums, heads = split_room[counts.splits * floats_of_split :], np.int32(config.heads)
            paging = (ints[at.splits :], positions, table, starts, stride, layer_offset, kv_heads, scale, seen)
            arguments = (room.attended, split_room, sums, room.q, room.q_rest, self._pages, *paging)
            kernels.attend_decode((config.kv_heads * self._group_tiles, counts.splits), (128,), arguments)
            if counts.splits > counts.singles:
                merging = (room.attended, split_room, sums, ints[at.singles :], positions, heads, scale, seen)
                grid = (-(-config.heads // _MERGE_HEADS), counts.singles)
                kernels.merge_splits(grid, (config.head_dim, _MERGE_HEADS), merging)
        if counts.tiles:
            paging = (ints[at.tiles :], positions, table, starts, stride, layer_offset, kv_heads, scale, seen)
            prefill = kernels.attend_prefill
            prefill.kernel(
                (config.heads, counts.tiles),
                (prefill.threads,),
                (room.attended, room.q, room.q_rest, self._prefill_pages, *paging),
                shared_mem=prefill.shared_bytes,
            )

    def _product(self, out: Array, x: Array, weight: Array, *, add: bool = False, factor: float = 1.0) -> None:
        """Compute a product like Blas.product, into float32 `out`; a single row uses our own kernel.

        A factor counts only with `add`.
        """
        if x.shape[0] > 1:
            self._blas.product(out, x, weight, add=add, factor=factor)
            return
        outputs, inputs = weight.shape
        share, blocks = self._row_share(-(-outputs // 2))
        sizes = (np.int32(inputs), np.int32(outputs), np.int32(share), np.int32(add), np.float32(factor))
        arguments = (out, x, weight, *sizes)
        self._kernels.row_product((blocks,), (32 * _ROW_WARPS,), arguments)

    def _activate(self, out: Array, x: Array, gate_up: Array, number: int, loras: StepLoras) -> None:
        """Compute SwiGLU (or GeGLU) of x · gateᵀ and x · upᵀ into `out`."""
        rows, width = out.shape
        if rows == 1 and not loras:
            share, blocks = self._row_share(width)
            arguments = (out, x, gate_up, np.int32(x.shape[1]), np.int32(width), np.int32(share))
            self._kernels.row_swiglu((blocks,), (32 * _ROW_WARPS,), arguments)
            return
        both = self._buffers.gate_up[:rows]
        self._blas.product(both, x, gate_up)
        loras.add(both, x, number, GATE_UP)
        blocks = -(-width // (_THREADS * self._kernels.pack))
        self._kernels.swiglu((rows, blocks), (_THREADS,), (out, both, np.int32(width)))

    def _row_share(self, pairs: int) -> tuple[int, int]:
        """Return the warps for each pair of weight rows, enough to keep the memory busy, and the thread blocks."""
        share = 1
        while share < _ROW_WARPS and pairs * share < _ROW_WARPS_WANTED * self._processors:
            share *= 2
        return share, -(-pairs * share // _ROW_WARPS)


def _pointer(array: Array | None) -> Any:
    """Return a kernel's argument for `array`; None is a null pointer, which CuPy takes only as a number."""
    return np.intp(0) if array is None else array
