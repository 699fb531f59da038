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
    angles, factor = frequencies(config.rope, config.head_dim)
    turns = np.arange(len(tokens))[:, None] * angles
    cosine, sine = np.cos(turns) * factor, np.sin(turns) * factor
    unseen = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)

    def wide(weight: NDArray[np.float32] | None) -> Floats:
        return np.zeros(1) if weight is None else weight.astype(np.float64)

    def norm(x: Floats, weight: NDArray[np.float32]) -> Floats:
        scale: Floats = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + config.norm_epsilon)
        return x * scale * wide(weight)

    def heads(x: Floats, weight: NDArray[np.float32], bias: NDArray[np.float32] | None) -> Floats:
        return (x @ wide(weight).T + wide(bias)).reshape(len(tokens), -1, config.head_dim).transpose(1, 0, 2)

    def turned(x: Floats) -> Floats:
        low, high = np.split(x, 2, axis=2)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=2)

    x = wide(weights.embedding)[tokens]
    for layer in weights.layers:
        h = norm(x, layer.input_norm)
        q, k = turned(heads(h, layer.q, layer.q_bias)), turned(heads(h, layer.k, layer.k_bias))
        k, v = (np.repeat(one, config.heads // config.kv_heads, axis=0) for one in (k, heads(h, layer.v, layer.v_bias)))
        scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(config.head_dim) + unseen)
        mixed = (scores / scores.sum(axis=2, keepdims=True)) @ v
        x = x + mixed.transpose(1, 0, 2).reshape(len(tokens), -1) @ wide(layer.o).T + wide(layer.o_bias)
        h = norm(x, layer.output_norm)
        gate = h @ wide(layer.gate).T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ wide(layer.up).T)) @ wide(layer.down).T
    return norm(x, weights.norm)


def embedding(states: Floats, pooling: str) -> Floats:
    """Return the embedding of these states, scaled to length 1."""
    vector = states.mean(axis=0) if pooling == "mean" else states[-1]
    unit: Floats = vector / np.linalg.norm(vector)
    return unit
