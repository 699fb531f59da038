"""A plain decoder in float64, as in the papers: one sequence, every position, no cache and no chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.worker.native.config import read_config
from services.worker.native.rope import frequencies
from services.worker.native.weights import load_weights

Floats = NDArray[np.float64]


def last_hidden_states(directory: Path, tokens: list[int]) -> Floats:
    """Return the states after the final norm, (positions, hidden): transformers' `last_hidden_state`."""
    config = read_config(directory)
    weights = load_weights(directory, config)
    positions, turned_dims = np.arange(len(tokens)), config.rotated
    turns = [frequencies(rope, turned_dims) for rope in config.ropes]

    def wide(weight: NDArray[np.float32] | None) -> Floats:
        return np.zeros(1) if weight is None else weight.astype(np.float64)

    def norm(x: Floats, weight: NDArray[np.float32] | None) -> Floats:
        if weight is None:
            return x
        scale: Floats = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        return x * scale * wide(weight)

    def heads(
        x: Floats, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, factors: NDArray[np.float32] | None
    ) -> Floats:
        y = x @ wide(weight).T + wide(bias)
        y = norm(y.reshape(len(tokens), -1, y.shape[1] if factors is None else len(factors)), factors)
        return y.reshape(len(tokens), -1, config.head_dim).transpose(1, 0, 2)

    def turned(x: Floats, layer: int) -> Floats:
        angles, factor = turns[config.rope_of(layer)]
        angle = positions[:, None] * angles
        cosine, sine = np.cos(angle) * factor, np.sin(angle) * factor
        low, high = np.split(x[..., :turned_dims], 2, axis=2)
        parts = [low * cosine - high * sine, high * cosine + low * sine, x[..., turned_dims:]]
        return np.concatenate(parts, axis=2)

    def activated(x: Floats) -> Floats:
        silu, inner = x / (1 + np.exp(-x)), np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        active: Floats = silu if config.activation == "silu" else 0.5 * x * (1 + np.tanh(inner))
        return active

    x = wide(weights.embedding)[tokens] * config.embedding_scale
    for number, layer in enumerate(weights.layers):
        h = norm(x, layer.input_norm)
        q = turned(heads(h, layer.q, layer.q_bias, layer.q_norm), number)
        k, v = turned(heads(h, layer.k, layer.k_bias, layer.k_norm), number), heads(h, layer.v, layer.v_bias, None)
        k, v = (np.repeat(one, config.heads // config.kv_heads, axis=0) for one in (k, v))
        scores = bent(q @ k.transpose(0, 2, 1) * config.attention_scale, config.score_cap)
        distance = positions[:, None] - positions
        scores[:, (distance < 0) | (distance >= (config.window_of(number) or len(tokens)))] = -np.inf
        shares = np.exp(scores)
        mixed = ((shares / shares.sum(axis=2, keepdims=True)) @ v).transpose(1, 0, 2).reshape(len(tokens), -1)
        x = x + config.residual_scale * norm(mixed @ wide(layer.o).T + wide(layer.o_bias), layer.attended_norm)
        h = norm(x, layer.output_norm)
        fed = (activated(h @ wide(layer.gate).T) * (h @ wide(layer.up).T)) @ wide(layer.down).T
        x = x + config.residual_scale * norm(fed, layer.fed_norm)
    return norm(x, weights.norm)


def logits_of(directory: Path, states: Floats) -> Floats:
    """Return the logits of these states, (positions, vocab)."""
    config = read_config(directory)
    head = load_weights(directory, config).head.astype(np.float64)
    return bent(states @ head.T * config.logit_scale, config.logit_cap)


def bent(x: Floats, cap: float) -> Floats:
    """Bend numbers by tanh to at most `cap`; 0 leaves them as they are."""
    return cap * np.tanh(x / cap) if cap else x


def embedding(states: Floats, pooling: str) -> Floats:
    """Return the embedding of these states, scaled to length 1."""
    vector = states.mean(axis=0) if pooling == "mean" else states[-1]
    unit: Floats = vector / np.linalg.norm(vector)
    return unit
