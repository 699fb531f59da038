"""A model's weights on the device: matrices in the element type, norms and biases in float32.

What is multiplied by the same rows lies together: q, k and v are one matrix, gate and up another.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.native.bfloat16 import narrowed
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.kernels import ElementType
from services.worker.native.linear import Array
from services.worker.native.weights import Checkpoint

_STORED: dict[ElementType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES: dict[ElementType, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # CuPy has no bfloat16; only our kernels and cuBLAS look into it
}


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """One decoder layer; biases are None where the model has none."""

    input_norm: Array
    qkv: Array
    """(queries + 2 · keys, hidden)"""
    qkv_bias: Array | None
    output: Array
    output_bias: Array | None
    output_norm: Array
    gate_up: Array
    """(2 · intermediate, hidden)"""
    down: Array


@dataclass(frozen=True, slots=True)
class CudaWeights:
    """All of a decoder's weights."""

    embedding: Array
    layers: tuple[CudaLayer, ...]
    norm: Array
    head: Array
    """(vocab, hidden); the embedding itself where they are tied."""


def load_cuda_weights(directory: Path, config: ModelConfig, element_type: ElementType) -> CudaWeights:
    """Copy a directory's weights to the current device, tensor by tensor. Raises ModelError."""
    checkpoint = Checkpoint(directory, config)
    dtype = DTYPES[element_type]

    def matrix(*names: str) -> Array:
        """The named matrices, one above the other."""
        rows = [checkpoint.shapes[name][0] for name in names]
        joined = cp.empty((sum(rows), checkpoint.shapes[names[0]][1]), dtype)
        first = 0
        for name, count in zip(names, rows, strict=True):
            joined[first : first + count] = _elements(checkpoint, name, element_type)
            first += count
        return joined

    def vector(*names: str) -> Array | None:
        if names[0] not in checkpoint.shapes:
            return None
        return cp.asarray(np.concatenate([checkpoint.floats(name) for name in names]))

    def layer(number: int) -> CudaLayer:
        stem = f"model.layers.{number}."
        attention = f"{stem}self_attn."
        return CudaLayer(
            input_norm=vector(f"{stem}input_layernorm.weight"),
            qkv=matrix(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias=vector(*(f"{attention}{name}_proj.bias" for name in "qkv")),
            output=matrix(f"{attention}o_proj.weight"),
            output_bias=vector(f"{attention}o_proj.bias"),
            output_norm=vector(f"{stem}post_attention_layernorm.weight"),
            gate_up=matrix(f"{stem}mlp.gate_proj.weight", f"{stem}mlp.up_proj.weight"),
            down=matrix(f"{stem}mlp.down_proj.weight"),
        )

    embedding = matrix("model.embed_tokens.weight")
    return CudaWeights(
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.layers)),
        norm=vector("model.norm.weight"),
        head=embedding if config.tied else matrix("lm_head.weight"),
    )


def _elements(checkpoint: Checkpoint, name: str, element_type: ElementType) -> Array:
    """One tensor on the device: its bytes as they are where it is stored in the element type, else through float32."""
    if checkpoint.entry(name).dtype == _STORED[element_type]:
        (stored,) = checkpoint.pieces(name, 1, sys.maxsize)
        return cp.asarray(np.frombuffer(stored, DTYPES[element_type]).reshape(checkpoint.shapes[name]))
    floats = cp.asarray(checkpoint.floats(name))
    if element_type == "bfloat16":
        return narrowed(cp, floats)
    return floats.astype(DTYPES[element_type])
