"""Loads a model's weights to the device: matrices in the element type, norms and biases in float32.

Matrices that are multiplied by the same rows are joined: q, k and v are one matrix, gate and up another. A rank of a
tensor-parallel group has the rows, and of output and down the columns, that belong to its heads and its part of the
feed-forward width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import Dtype
from services.worker.native.bfloat16 import to_bfloat16
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.pieces import Piece, PiecesOfLayers
from services.worker.native.cuda.staged_copies import ROOM_BYTES, ROOMS, Bytes, StagedCopies, bytes_of
from services.worker.native.linear import Array
from services.worker.native.parallel.shares import Share
from services.worker.native.tensor_file import Floats
from services.worker.native.weights import EMBEDDING, HEAD, NORM_NAMES, Checkpoint
from services.worker.transfer.cuda import ANYWHERE, ERRORS, sleeping_event, use_device

_STORED: dict[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES: dict[Dtype, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # CuPy has no bfloat16; only our kernels and cuBLAS interpret it
}
_PIECE_ELEMENTS = 16 << 20
STAGED_BYTES = 1 << 20
"""Fewest bytes of an array for which it pays to pin rooms, which takes 30 ms and more."""


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """The weights of one decoder layer; a bias or norm is None if the model does not have it."""

    input_norm: Array | None
    qkv: Array
    """The joined matrix of q, k and v: (queries + 2 · keys, hidden)."""
    qkv_bias: Array | None
    output: Array
    output_bias: Array | None
    output_norm: Array | None
    gate_up: Array
    """The joined matrix of gate and up: (2 · intermediate, hidden)."""
    down: Array
    query_norm: Array | None = None
    """The factors of queries, then those of keys; of one head each, or of all heads."""
    attended_norm: Array | None = None
    """The norm of what attention adds to the residual stream."""
    fed_norm: Array | None = None
    """The norm of what the feed-forward part adds."""


@dataclass(frozen=True, slots=True)
class CudaWeights:
    """All of a decoder's weights."""

    embedding: Array
    layers: tuple[CudaLayer, ...]
    norm: Array
    head: Array
    """The output projection, (vocab, hidden); the embedding itself if they are tied. A rank has its rows."""


def load_cuda_weights(
    directory: Path,
    config: ModelConfig,
    element_type: Dtype,
    progress: Callable[[float], None] = lambda _share: None,
    *,
    place: Callable[[tuple[int, ...], Any], Array] = cp.empty,
    fills: bool = True,
    share: Share | None = None,
) -> CudaWeights:
    """Copy a directory's weights to the current device, piece by piece. Raise ModelError.

    `progress` is called with the share of the weights that are on the device. `place` returns the memory of each
    matrix; without `fills` it has the matrix already. `config` is that of the whole model; `share` is a rank's part.
    """
    checkpoint = Checkpoint(directory, config)
    pieces = PiecesOfLayers(config, share)
    dtype = DTYPES[element_type]
    elements = sum(prod(shape) for shape in checkpoint.shapes.values())
    done = 0

    def count(name: str) -> None:
        nonlocal done
        done += prod(checkpoint.shapes[name])
        progress(min(1.0, done / elements))

    def matrix(*parts: Piece) -> Array:
        """Return these parts of matrices, one above the other."""
        shapes = [part.shape(checkpoint.shapes[part.name]) for part in parts]
        joined = place((sum(rows for rows, _ in shapes), shapes[0][1]), dtype)
        first = 0
        for part, (height, _) in zip(parts, shapes, strict=True):
            if fills:
                _fill(joined[first : first + height], checkpoint, part, element_type, copies)
            first += height
            count(part.name)
        return joined

    def vector(*parts: Piece, read: Callable[[str], Floats] = checkpoint.floats) -> Array | None:
        if parts[0].name not in checkpoint.shapes:
            return None
        joined = cp.asarray(np.concatenate([read(part.name)[part.rows] for part in parts]))
        for part in parts:
            count(part.name)
        return joined

    def scaled(name: str) -> Floats:
        return checkpoint.floats(name) * np.float32(config.residual_scale)

    def layer(number: int) -> CudaLayer:
        stem = f"model.layers.{number}."
        attention = f"{stem}self_attn."
        norms = {
            field: vector(Piece(f"{stem}{name}.weight"), read=checkpoint.norm)
            for field, name in NORM_NAMES[config.norms].items()
        }
        return CudaLayer(
            input_norm=norms.get("input_norm"),
            qkv=matrix(*pieces.qkv(attention)),
            qkv_bias=vector(*pieces.qkv_bias(attention)),
            output=matrix(pieces.output(attention)),
            output_bias=vector(Piece(f"{attention}o_proj.bias"), read=scaled),
            output_norm=norms.get("output_norm"),
            gate_up=matrix(*pieces.gate_up(stem)),
            down=matrix(pieces.down(stem)),
            query_norm=vector(*(Piece(f"{attention}{name}_norm.weight") for name in "qk"), read=checkpoint.norm),
            attended_norm=norms.get("attended_norm"),
            fed_norm=norms.get("fed_norm"),
        )

    vocab = slice(None) if share is None else share.vocab
    with staged_copies() if fills else nullcontext() as copies:
        embedding = matrix(Piece(EMBEDDING))
        return CudaWeights(
            embedding=embedding,
            layers=tuple(layer(number) for number in range(config.layers)),
            norm=vector(Piece("model.norm.weight"), read=checkpoint.norm),
            head=(embedding if share is None else embedding[vocab]) if checkpoint.tied else matrix(Piece(HEAD, vocab)),
        )


def move_weights(weights: CudaWeights, move: Callable[[Array], Array]) -> CudaWeights:
    """Return weights with what `move` makes of each array."""

    def moved(array: Array | None) -> Array | None:
        return None if array is None else move(array)

    embedding = move(weights.embedding)
    return CudaWeights(
        embedding=embedding,
        layers=tuple(
            CudaLayer(**{field.name: moved(getattr(layer, field.name)) for field in fields(CudaLayer)})
            for layer in weights.layers
        ),
        norm=move(weights.norm),
        head=embedding if weights.head is weights.embedding else move(weights.head),
    )


def weights_on_host(weights: CudaWeights, stays: Callable[[int], bool] = lambda _address: False) -> CudaWeights:
    """Return a copy of weights in host memory, which is made on the current stream, but of an array only if not `stays`
    of its address. Raise MemoryError."""
    with staged_copies() as copies:

        def copied(array: Array) -> Array:
            if stays(array.data.ptr):
                return array
            if array.nbytes < STAGED_BYTES:
                return array.get()
            host = np.empty(array.shape, array.dtype)
            copies.to_host(bytes_of(host), array.data.ptr)
            return host

        return move_weights(weights, copied)


def weights_on_device(weights: CudaWeights) -> CudaWeights:
    """Return a copy on the device of what `weights_on_host` returned. Raise DeviceMemoryExhausted."""
    with staged_copies() as copies:

        def copied(array: Array) -> Array:
            if not isinstance(array, np.ndarray):
                return array
            if array.nbytes < STAGED_BYTES:
                return cp.asarray(array)
            device = cp.empty(array.shape, array.dtype)
            copies.to_device(device.data.ptr, bytes_of(array))
            return device

        return move_weights(weights, copied)


def staged_copies() -> StagedCopies:
    """Return copies on the current stream, through memory that is pinned for as long as they take."""
    stream = cp.cuda.get_current_stream()

    def begin(to: int, source: int, size_bytes: int) -> Callable[[], None]:
        cp.cuda.runtime.memcpyAsync(to, source, size_bytes, ANYWHERE, stream.ptr)
        event = sleeping_event()
        event.record(stream)
        synchronize: Callable[[], None] = event.synchronize
        return synchronize

    return StagedCopies(_rooms, begin, prepare=partial(use_device, cp.cuda.Device().id))


def _rooms() -> list[Bytes]:
    """Return pinned rooms. They are not CuPy's, which would keep the memory; and they are not pinned, which is slow, if
    the system pins no more."""
    size_bytes = ROOMS * ROOM_BYTES
    try:
        memory: Any = cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(size_bytes), 0)
    except ERRORS:
        memory = np.empty(size_bytes, np.uint8)
    return list(np.frombuffer(memory, np.uint8, size_bytes).reshape(ROOMS, ROOM_BYTES))


def _fill(matrix: Array, checkpoint: Checkpoint, part: Piece, element_type: Dtype, copies: StagedCopies | None) -> None:
    """Copy a part of one tensor: unchanged if it is stored in the element type, otherwise through float32.

    It is copied in pieces, so that a conversion needs little additional memory.
    """
    same = checkpoint.entry(part.name).dtype == _STORED[element_type]
    if same:
        (stored,) = checkpoint.pieces(part.name, 1, sys.maxsize)
        source = np.frombuffer(stored, DTYPES[element_type]).reshape(checkpoint.shapes[part.name])
    else:
        source = checkpoint.floats(part.name)
    source = source[part.rows, part.columns]
    height = max(1, _PIECE_ELEMENTS // matrix.shape[1])
    for first in range(0, matrix.shape[0], height):
        piece, to = np.ascontiguousarray(source[first : first + height]), matrix[first : first + height]
        if same:
            assert copies is not None, "a matrix that is filled"
            copies.to_device(to.data.ptr, bytes_of(piece))
        elif element_type == "bfloat16":
            to[...] = to_bfloat16(cp, cp.asarray(piece))
        else:
            to[...] = cp.asarray(piece)
