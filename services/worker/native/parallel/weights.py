"""The weights that one rank computes with, and its part of LoRAs.

Rows of a matrix are views of the mapped file, which all ranks share. Columns, those of o and down, are copied: read in
pieces of rows, a decode step took 1.17 times as long. The copies of all ranks together are a third of a layer more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.lora_file import LoraLayers, LoraPair
from services.worker.native.parallel.shares import Share
from services.worker.native.weights import Layer, Weights


def rank_weights(weights: Weights, config: ModelConfig, share: Share) -> Weights:
    """Return a rank's part of a model's weights. `config` is that of the whole model."""
    return replace(
        weights,
        layers=tuple(_rank_layer(layer, config, share) for layer in weights.layers),
        head_part=weights.head[share.vocab],
    )


def _rank_layer(layer: Layer, config: ModelConfig, share: Share) -> Layer:
    queries, keys = _head_rows(config, share)
    whole = config.query_norm == "whole"  # else the norm of a head is the same for all
    return replace(
        layer,
        q=layer.q[queries],
        k=layer.k[keys],
        v=layer.v[keys],
        o=np.ascontiguousarray(layer.o[:, queries]),
        q_bias=_rows(layer.q_bias, queries),
        k_bias=_rows(layer.k_bias, keys),
        v_bias=_rows(layer.v_bias, keys),
        gate=layer.gate[share.intermediate],
        up=layer.up[share.intermediate],
        down=np.ascontiguousarray(layer.down[:, share.intermediate]),
        q_norm=_rows(layer.q_norm, queries) if whole else layer.q_norm,
        k_norm=_rows(layer.k_norm, keys) if whole else layer.k_norm,
    )


def rank_lora(layers: LoraLayers, config: ModelConfig, share: Share) -> LoraLayers:
    """Return a rank's part of a LoRA: of a matrix of which it has rows, A whole and these rows of B; of one of which it
    has columns, these columns of A and B whole, whose products are added up with those of the matrix."""
    queries, keys = _head_rows(config, share)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys} | dict.fromkeys(
        ("gate_proj", "up_proj"), share.intermediate
    )
    columns = {"o_proj": queries, "down_proj": share.intermediate}

    def part(name: str, pair: LoraPair) -> LoraPair:
        if name in rows:
            return LoraPair(pair.a, pair.b[rows[name]].copy())
        return LoraPair(pair.a[:, columns[name]].copy(), pair.b)

    return tuple({name: part(name, pair) for name, pair in layer.items()} for layer in layers)


def _head_rows(config: ModelConfig, share: Share) -> tuple[slice, slice]:
    """Return the rows of q, and those of k and v, that belong to a rank's heads."""
    size = config.head_dim
    return (
        slice(share.heads.start * size, share.heads.stop * size),
        slice(share.kv_heads.start * size, share.kv_heads.stop * size),
    )


def _rows(vector: Array | None, rows: slice) -> Array | None:
    return None if vector is None else vector[rows]
