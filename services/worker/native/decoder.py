"""The decoder's arithmetic: one step of many sequences at a time, for Llama and the models that resemble it.

    embed → for each layer: RMSNorm → q, k, v → rotate → write KV → attend over paged KV → project
                            RMSNorm → SwiGLU                                                        → RMSNorm → logits
                                                                                                            └─▶ sums

What a model has in addition follows from its ModelConfig: norms at other places, norms of queries and keys, a sliding
window, factors, bounds by tanh, another activation or rotation. All tokens of a step go through a weight together; only
attention treats sequences separately. All arithmetic is float32; the KV cache may store narrower numbers. This decoder
runs on NumPy; `cuda/decoder.py` runs on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.worker.native.config import ModelConfig
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Array, Linear
from services.worker.native.lora import LoraRows
from services.worker.native.pooling import RowSpan, Sums
from services.worker.native.rope import rope_tables
from services.worker.native.step import Group, Span, Step, StepWork, lay_out
from services.worker.native.weights import Layer, Weights

_SCORES_LIMIT = 2 << 20
"""The most attention scores that a prefill holds at once (8 MiB); a chunk's rows are tiled to stay below."""
_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
_GATHER_LIMIT_BYTES = 32 << 20
"""The most bytes of one layer's keys and values that a group of decoding sequences copies together."""


class Ranks(Protocol):
    """Joins the parts of a step that the ranks of a tensor-parallel group compute (native/parallel). All ranks call the
    same in the same order."""

    def total(self, part: Array) -> Array:
        """Return the sum of all ranks' parts, contiguous float32 arrays of one shape, in place of `part`."""
        ...

    def joined(self, part: Array) -> Array:
        """Return the columns of all ranks next to one another, (rows, vocab); at ranks other than 0 nothing of use."""
        ...


class Decoder:
    """Computes steps with a model's weights and KV pages."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KvCache,
        linear: Linear,
        positions: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Make the rotation tables for positions below `positions`, which bounds those ever computed. With `ranks`,
        config, weights and cache are a rank's part."""
        self._config = config
        self._weights = weights
        self._cache = cache
        self._linear = linear
        self._ranks = ranks
        self._turns: list[tuple[Array, Array]] = []
        for rope in config.ropes:
            cosines, sines = rope_tables(rope, config.rotated, positions)
            # Elements that are not rotated are multiplied by 1, and 0 times themselves is added.
            rest = np.zeros((positions, config.head_dim - config.rotated), np.float32)
            self._turns.append((np.hstack([cosines, cosines, rest + 1]), np.hstack([-sines, sines, rest])))
        self._scale = np.float32(config.attention_scale)
        self._group_limit = _GATHER_LIMIT_BYTES // (2 * 4 * config.keys)

    def step(self, works: Sequence[StepWork]) -> Array:
        """Compute every work's tokens and store their KV; return logits (drawing works, vocab), in order of works."""
        logits, _, _ = self.pool(works, ())
        return logits

    def pool(
        self,
        works: Sequence[StepWork],
        spans: Sequence[RowSpan],
        loras: Sequence[LoraRows] = (),
        placed: Sequence[tuple[int, Array]] = (),
    ) -> tuple[Array, Sums, Array]:
        """Compute a step, as `step` does, with these LoRAs. Return its logits, the sum of the hidden states of each of
        these spans of rows, and what `logits` takes: the states of all rows (rows, hidden) before the final norm.
        `placed` has a first row, and the embeddings that stand in for those of the tokens from there on."""
        config, weights = self._config, self._weights
        step = lay_out(works, self._cache.layout.block_size, self._group_limit)
        positions = step.positions
        turns = [(cosines[positions][:, None], sines[positions][:, None]) for cosines, sines in self._turns]
        hidden = weights.embedding[step.tokens]
        if config.embedding_scale != 1:
            hidden *= np.float32(config.embedding_scale)
        for first, embeddings in placed:
            hidden[first : first + len(embeddings)] = embeddings
        for number, layer in enumerate(weights.layers):
            attended = self._attend(number, layer, self._normed(hidden, layer.input_norm), step, turns, loras)
            self._add(hidden, attended, layer.attended_norm)
            fed = self._feed(number, layer, self._normed(hidden, layer.output_norm), loras)
            self._add(hidden, fed, layer.fed_norm)
        sums = np.empty((len(spans), config.hidden))
        for number, span in enumerate(spans):
            states = self._norm(hidden[span.first : span.first + span.count], weights.norm)
            states.sum(axis=0, dtype=np.float64, out=sums[number])
        return self._drawing_logits(hidden[step.drawing_rows]), sums, hidden

    def logits(self, hidden: Array) -> Array:
        """Return the logits (rows, vocab) of hidden states before the final norm."""
        return self._logits(hidden, self._weights.head)

    def _drawing_logits(self, hidden: Array) -> Array:
        """Return the logits of a step, of which each rank computes its part of the vocabulary."""
        if self._ranks is None:
            return self.logits(hidden)
        return self._ranks.joined(self._logits(hidden, self._weights.head_part))

    def _logits(self, hidden: Array, head: Array) -> Array:
        logits = self._linear(self._norm(hidden, self._weights.norm), head)
        if self._config.logit_scale != 1:
            logits *= np.float32(self._config.logit_scale)
        return _bent(logits, self._config.logit_cap)

    def _normed(self, hidden: Array, weight: Array | None) -> Array:
        return hidden if weight is None else self._norm(hidden, weight)

    def _add(self, hidden: Array, part: Array, norm: Array | None) -> None:
        """Add what attention or the feed-forward part gave to the residual stream."""
        if norm is not None:
            part = self._norm(part, norm)
        if self._config.residual_scale != 1:
            part *= np.float32(self._config.residual_scale)
        hidden += part

    def _norm(self, x: Array, weight: Array) -> Array:
        """Apply RMSNorm to each vector of the last axis by itself."""
        mean_square = (x * x).sum(axis=-1, keepdims=True) / x.shape[-1]
        scale = 1.0 / np.sqrt(mean_square + self._config.norm_epsilon)
        normed = x * scale
        normed *= weight
        return normed

    def _feed(self, number: int, layer: Layer, x: Array, loras: Sequence[LoraRows]) -> Array:
        """Apply SwiGLU, down(silu(gate) · up), or the same with GELU."""

        def project(x: Array, weight: Array, name: str) -> Array:
            return _with_loras(self._linear(x, weight), x, loras, number, name)

        gate = project(x, layer.gate, "gate_proj")
        half = gate * 0.5
        if self._config.activation == "silu":
            # silu(g) = g · sigmoid(g), computed with tanh, because exp(-g) overflows where the result is 0.
            gate = half * np.tanh(half) + half
        else:
            gate = half * np.tanh(_GELU_SCALE * gate * (1 + _GELU_CUBE * gate * gate)) + half
        gate *= project(x, layer.up, "up_proj")
        return self._joined(gate, layer.down, loras, number, "down_proj")

    def _attend(
        self,
        number: int,
        layer: Layer,
        x: Array,
        step: Step,
        turns: Sequence[tuple[Array, Array]],
        loras: Sequence[LoraRows],
    ) -> Array:
        config, turn = self._config, turns[self._config.rope_of(number)]
        rows = x.shape[0]

        def project(x: Array, weight: Array, bias: Array | None, name: str) -> Array:
            return _with_loras(_biased(self._linear(x, weight), bias), x, loras, number, name)

        q = self._head_norm(project(x, layer.q, layer.q_bias, "q_proj"), layer.q_norm)
        k = self._head_norm(project(x, layer.k, layer.k_bias, "k_proj"), layer.k_norm)
        v = project(x, layer.v, layer.v_bias, "v_proj").reshape(rows, config.kv_heads, config.head_dim)
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
        attended = attended.reshape(rows, config.queries)
        return _biased(self._joined(attended, layer.o, loras, number, "o_proj"), layer.o_bias)

    def _joined(self, x: Array, weight: Array, loras: Sequence[LoraRows], number: int, name: str) -> Array:
        """Multiply by o_proj or down_proj, of which a rank has the columns that its heads and width belong to."""
        part = _with_loras(self._linear(x, weight), x, loras, number, name)
        return part if self._ranks is None else self._ranks.total(part)

    def _head_norm(self, x: Array, weight: Array | None) -> Array:
        """Apply RMSNorm to each head of queries or keys, (rows, width), or to each row; `weight` has that length."""
        if weight is None:
            return x
        if self._ranks is not None and self._config.query_norm == "whole":
            # Heads that several ranks have count as often, above and below the line.
            counts = np.full(len(x), x.shape[1], np.float32)
            squares = self._ranks.total(np.stack([(x * x).sum(axis=-1), counts], axis=1))
            return x / np.sqrt(squares[:, :1] / squares[:, 1:] + self._config.norm_epsilon) * weight
        return self._norm(x.reshape(len(x), -1, len(weight)), weight).reshape(x.shape)

    def _rotate(self, x: Array, turn: tuple[Array, Array]) -> Array:
        """Rotate pairs (i, i + rotated / 2) of (rows, heads, head_dim), the Hugging Face order."""
        cosine, sine = turn
        end, half = self._config.rotated, self._config.rotated // 2
        swapped = np.concatenate([x[:, :, half:end], x[:, :, :half], x[:, :, end:]], axis=2)
        swapped *= sine  # its first half is negative
        rotated = x * cosine
        rotated += swapped
        return rotated

    def _attend_span(self, number: int, span: Span, q: Array) -> Array:
        """Attend causally from a chunk to its history and itself; return (count, heads, head_dim)."""
        config, window = self._config, self._config.window_of(number)
        # All positions count from `begin`, the start of the first block that is seen.
        begin = self._first_seen(span.start + 1, window)
        start, end = span.start - begin, span.start + span.count - begin
        keys, values = self._cache.read(number, span.table[:, begin // self._cache.layout.block_size :], end)
        keys = keys[0].transpose(1, 2, 0)[:, None]  # kv_heads, 1, head_dim, positions
        values = values[0].transpose(1, 0, 2)[:, None]  # kv_heads, 1, positions, head_dim
        attended = np.empty(q.shape, np.float32)
        tile = max(1, min(span.count, _SCORES_LIMIT // (config.heads * end)))
        for first in range(0, span.count, tile):
            count = min(tile, span.count - first)
            seen = start + first + count
            rows = q[first : first + count].reshape(count, config.kv_heads, -1, config.head_dim)
            # scores: kv_heads, heads of each, count, seen
            scores = self._bent_scores(np.matmul(rows.transpose(1, 2, 0, 3), keys[..., :seen]))
            # Row i does not see the last count - 1 - i positions: only that corner is masked.
            scores[..., seen - count :] += np.triu(np.full((count, count), -np.inf, np.float32), 1)
            if 0 < window < seen:
                beyond = np.arange(seen) <= np.arange(seen - count, seen)[:, None] - window
                scores += np.where(beyond, np.float32(-np.inf), np.float32(0))
            mixed = np.matmul(self._softmax(scores), values[..., :seen, :])
            attended[first : first + count] = mixed.transpose(2, 0, 1, 3).reshape(count, config.heads, -1)
        return attended

    def _attend_group(self, number: int, group: Group, q: Array) -> Array:
        """Attend from one token of each sequence to its own history; return (members, heads, head_dim)."""
        config, window = self._config, self._config.window_of(number)
        members = q.shape[0]
        begin = self._first_seen(int(group.lengths.min()), window)
        table = group.table[:, begin // self._cache.layout.block_size :]
        keys, values = self._cache.read(number, table, group.longest - begin)
        rows = q.reshape(members, config.kv_heads, -1, config.head_dim)
        # scores: members, kv_heads, heads of each, the longest's positions from `begin` on
        scores = self._bent_scores(np.matmul(rows, keys.transpose(0, 2, 3, 1)))
        if members > 1:
            scores += group.mask[..., begin:]
        if 0 < window < group.longest:
            beyond = np.arange(begin, group.longest) < group.lengths[:, None] - window
            scores += np.where(beyond, np.float32(-np.inf), np.float32(0))[:, None, None]
        return np.matmul(self._softmax(scores), values.transpose(0, 2, 1, 3)).reshape(q.shape)

    def _first_seen(self, length: int, window: int) -> int:
        """Return the first position of the first block that the last of `length` positions sees."""
        size = self._cache.layout.block_size
        return max(0, length - window) // size * size if window else 0

    def _bent_scores(self, scores: Array) -> Array:
        """Bend scaled scores to the model's bound, if it has one; the result is unscaled again."""
        return _bent(scores, self._config.score_cap / float(self._scale))

    def _softmax(self, scores: Array) -> Array:
        """Apply softmax over the last axis, in place, to unscaled products of queries and keys."""
        scores -= scores.max(axis=-1, keepdims=True)
        scores *= self._scale
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores


def _biased(y: Array, bias: Array | None) -> Array:
    """Add a bias to a product, in place, and return it."""
    if bias is not None:
        y += bias
    return y


def _bent(x: Array, cap: float) -> Array:
    """Return cap · tanh(x / cap), in place; a cap of 0 changes nothing."""
    if cap:
        x *= np.float32(1 / cap)
        np.tanh(x, out=x)
        x *= np.float32(cap)
    return x


def _with_loras(y: Array, x: Array, loras: Sequence[LoraRows], number: int, name: str) -> Array:
    """Add the LoRAs' share to a product, and return it."""
    for lora in loras:
        lora.add(y, x, number, name)
    return y
