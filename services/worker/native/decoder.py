"""The decoder's arithmetic: Llama and Qwen2, one step of many sequences at a time.

    embed → for each layer: RMSNorm → q, k, v → rotate → write KV → attend over paged KV → project
                            RMSNorm → SwiGLU                                                        → RMSNorm → logits
                                                                                                            └─▶ sums

All tokens of a step go through a weight together; only attention treats sequences separately. All arithmetic is
float32; the KV cache may store narrower numbers. This decoder runs on NumPy; `cuda/decoder.py` runs on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.worker.native.config import ModelConfig
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Array, Linear
from services.worker.native.pooling import RowSpan, Sums
from services.worker.native.rope import rope_tables
from services.worker.native.step import Group, Span, Step, lay_out
from services.worker.native.weights import Layer, Weights
from services.worker.runner import Work

_SCORES_LIMIT = 2 << 20
"""The most attention scores that a prefill holds at once (8 MiB); a chunk's rows are tiled to stay below."""
_GATHER_LIMIT_BYTES = 32 << 20
"""The most bytes of one layer's keys and values that a group of decoding sequences copies together."""


class Decoder:
    """Computes steps with a model's weights and KV pages."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KvCache, linear: Linear, positions: int) -> None:
        """Make the rotation tables for positions below `positions`, which bounds those ever computed."""
        self._config = config
        self._weights = weights
        self._cache = cache
        self._linear = linear
        cosines, sines = rope_tables(config.rope, config.head_dim, positions)
        self._cosines = np.concatenate([cosines, cosines], axis=1)
        self._sines = np.concatenate([-sines, sines], axis=1)
        self._scale = np.float32(1 / math.sqrt(config.head_dim))
        self._group_limit = _GATHER_LIMIT_BYTES // (2 * 4 * config.keys)

    def step(self, works: Sequence[Work]) -> Array:
        """Compute every work's tokens and store their KV; return logits (drawing works, vocab), in order of works."""
        logits, _ = self.pool(works, ())
        return logits

    def pool(self, works: Sequence[Work], spans: Sequence[RowSpan]) -> tuple[Array, Sums]:
        """Compute a step, as `step` does, and also sum the hidden states of each of these spans of rows."""
        weights = self._weights
        step = lay_out(works, self._cache.layout.block_size, self._group_limit)
        positions = step.positions
        turn = (self._cosines[positions][:, None], self._sines[positions][:, None])
        hidden = weights.embedding[step.tokens]
        for number, layer in enumerate(weights.layers):
            hidden += self._attend(number, layer, self._norm(hidden, layer.input_norm), step, turn)
            hidden += self._feed(layer, self._norm(hidden, layer.output_norm))
        sums = np.empty((len(spans), self._config.hidden))
        for number, span in enumerate(spans):
            states = self._norm(hidden[span.first : span.first + span.count], weights.norm)
            states.sum(axis=0, dtype=np.float64, out=sums[number])
        return self._linear(self._norm(hidden[step.drawing_rows], weights.norm), weights.head), sums

    def _norm(self, x: Array, weight: Array) -> Array:
        """Apply RMSNorm to each row by itself."""
        mean_square = (x * x).sum(axis=1, keepdims=True) / self._config.hidden
        scale = 1.0 / np.sqrt(mean_square + self._config.norm_epsilon)
        normed = x * scale
        normed *= weight
        return normed

    def _feed(self, layer: Layer, x: Array) -> Array:
        """Apply SwiGLU: down(silu(gate) · up)."""
        gate = self._linear(x, layer.gate)
        # silu(g) = g · sigmoid(g), computed with tanh, because exp(-g) overflows where the result is 0.
        half = gate * 0.5
        gate = half * np.tanh(half) + half
        gate *= self._linear(x, layer.up)
        return self._linear(gate, layer.down)

    def _attend(self, number: int, layer: Layer, x: Array, step: Step, turn: tuple[Array, Array]) -> Array:
        config = self._config
        rows = x.shape[0]
        q = self._project(x, layer.q, layer.q_bias)
        k = self._project(x, layer.k, layer.k_bias)
        v = self._project(x, layer.v, layer.v_bias).reshape(rows, config.kv_heads, config.head_dim)
        turned = self._rotate(np.concatenate([q, k], axis=1).reshape(rows, -1, config.head_dim), turn)
        q, k = turned[:, : config.heads], turned[:, config.heads :]
        self._cache.write(number, step.slots, step.offsets, k, v)
        attended = np.empty((rows, config.heads, config.head_dim), np.float32)
        for span in step.spans:
            rows_of_span = slice(span.first, span.first + span.count)
            attended[rows_of_span] = self._attend_span(number, span, q[rows_of_span])
        for group in step.groups:
            members = group.rows
            attended[members] = self._attend_group(number, group, q[members])
        return self._project(attended.reshape(rows, config.queries), layer.o, layer.o_bias)

    def _project(self, x: Array, weight: Array, bias: Array | None) -> Array:
        y = self._linear(x, weight)
        if bias is not None:
            y += bias
        return y

    def _rotate(self, x: Array, turn: tuple[Array, Array]) -> Array:
        """Rotate pairs (i, i + head_dim / 2) of (rows, heads, head_dim), the Hugging Face order."""
        cosine, sine = turn
        half = x.shape[2] // 2
        swapped = np.concatenate([x[:, :, half:], x[:, :, :half]], axis=2)
        swapped *= sine  # its first half is negative
        rotated = x * cosine
        rotated += swapped
        return rotated

    def _attend_span(self, number: int, span: Span, q: Array) -> Array:
        """Attend causally from a chunk to its history and itself; return (count, heads, head_dim)."""
        config = self._config
        end = span.start + span.count
        keys, values = self._cache.read(number, span.table, end)
        keys = keys[0].transpose(1, 2, 0)[:, None]  # kv_heads, 1, head_dim, positions
        values = values[0].transpose(1, 0, 2)[:, None]  # kv_heads, 1, positions, head_dim
        attended = np.empty(q.shape, np.float32)
        tile = max(1, min(span.count, _SCORES_LIMIT // (config.heads * end)))
        for first in range(0, span.count, tile):
            count = min(tile, span.count - first)
            seen = span.start + first + count
            rows = q[first : first + count].reshape(count, config.kv_heads, -1, config.head_dim)
            scores = np.matmul(rows.transpose(1, 2, 0, 3), keys[..., :seen])  # kv_heads, heads of each, count, seen
            # Row i does not see the last count - 1 - i positions: only that corner is masked.
            scores[..., seen - count :] += np.triu(np.full((count, count), -np.inf, np.float32), 1)
            mixed = np.matmul(self._softmax(scores), values[..., :seen, :])
            attended[first : first + count] = mixed.transpose(2, 0, 1, 3).reshape(count, config.heads, -1)
        return attended

    def _attend_group(self, number: int, group: Group, q: Array) -> Array:
        """Attend from one token of each sequence to its own history; return (members, heads, head_dim)."""
        config = self._config
        members = q.shape[0]
        keys, values = self._cache.read(number, group.table, group.longest)
        rows = q.reshape(members, config.kv_heads, -1, config.head_dim)
        scores = np.matmul(rows, keys.transpose(0, 2, 3, 1))  # members, kv_heads, heads of each, longest
        if members > 1:
            scores += group.mask
        return np.matmul(self._softmax(scores), values.transpose(0, 2, 1, 3)).reshape(q.shape)

    def _softmax(self, scores: Array) -> Array:
        """Apply softmax over the last axis, in place, to unscaled products of queries and keys."""
        scores -= scores.max(axis=-1, keepdims=True)
        scores *= self._scale
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores
