"""The device memory that steps compute in, allocated once for the largest step; and pinned host memory for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import Dtype
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import StepLimits, step_arrays
from services.worker.native.cuda.weights import DTYPES
from services.worker.native.linear import Array
from services.worker.native.rope import rope_tables

MOST_ROPES = 2
"""The rotations of a model: its own, and that of layers with a window."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The arrays of a step. `decoder` shows their use; `capacity.step_arrays` has their shapes."""

    hidden: Array
    normed: Array
    qkv: Array
    q: Array
    q_rest: Array
    """The rounding errors of `q`; only float16 uses them."""
    added: Array
    """What is normed, or is a rank's part of a sum, before it is added to `hidden`; one row if there is neither."""
    attended: Array
    gate_up: Array
    activated: Array
    every_row: Array
    split_room: Array
    logits: Array
    changed_logits: Array
    """Room of `choose_special`, which filters logits there."""
    token_counts: Array
    """How often tokens are in the histories of sequences that have penalties."""
    ints: Array
    cosines: Array
    sines: Array

    @staticmethod
    def allocate(config: ModelConfig, limits: StepLimits, element_type: Dtype) -> Buffers:
        """Allocate the arrays for steps of up to `limits`, on the current stream."""
        dtypes = {"element": DTYPES[element_type], "float32": cp.float32, "int32": cp.int32}
        arrays = {name: cp.empty(shape, dtypes[item]) for name, (shape, item) in step_arrays(config, limits).items()}
        arrays["every_row"].set(cp.arange(limits.rows, dtype=cp.int32).get())
        for number, rope in enumerate(config.ropes):
            tables = _tables(rope, config.head_dim, limits.positions, config.rotated)
            for name, table in zip(("cosines", "sines"), tables, strict=True):
                arrays[name][number].set(table)
        return Buffers(**arrays)


_tables = lru_cache(maxsize=MOST_ROPES)(rope_tables)
"""Keeps the tables of a model in host memory for its next wake: 33 MB for 64k positions of 64 pairs."""


def pinned_array(count: int, dtype: Any) -> Any:
    """Return an uninitialised array (count,) of `dtype` in pinned host memory, aligned to 256 bytes.

    Kernels read and write it in place, and no thread has to wait for a copy of it. The array keeps the memory.
    """
    size_bytes = count * np.dtype(dtype).itemsize
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size_bytes), dtype, count)


def kernel_address(array: Any) -> np.uintp:
    """Return an array's host address as a kernel's argument."""
    return np.uintp(array.ctypes.data)
