"""The device memory that steps compute in: reserved once, as large as the largest step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import Dtype
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.capacity import StepLimits, step_arrays
from services.worker.native.cuda.weights import DTYPES
from services.worker.native.linear import Array
from services.worker.native.rope import rope_tables


@dataclass(frozen=True, slots=True)
class Buffers:
    """What they are for is drawn in `decoder`; shapes are in `capacity`."""

    hidden: Array
    normed: Array
    qkv: Array
    q: Array
    q_rest: Array
    """What rounding took from `q`; float16 alone uses it."""
    attended: Array
    gate_up: Array
    activated: Array
    every_row: Array
    split_room: Array
    logits: Array
    ints: Array
    cosines: Array
    sines: Array

    @staticmethod
    def allocate(config: ModelConfig, limits: StepLimits, element_type: Dtype) -> Buffers:
        """On the current stream."""
        dtypes = {"element": DTYPES[element_type], "float32": cp.float32, "int32": cp.int32}
        arrays = {name: cp.empty(shape, dtypes[item]) for name, (shape, item) in step_arrays(config, limits).items()}
        arrays["every_row"].set(cp.arange(limits.rows, dtype=cp.int32).get())
        for name, table in zip(
            ("cosines", "sines"), rope_tables(config.rope, config.head_dim, limits.positions), strict=True
        ):
            arrays[name].set(table)
        return Buffers(**arrays)


def pinned_array(count: int, dtype: Any) -> Any:
    """(count,) of `dtype`, aligned to 256 bytes; what is there is anything. The array keeps the memory."""
    size_bytes = count * np.dtype(dtype).itemsize
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size_bytes), dtype, count)


def kernel_address(array: Any) -> np.uintp:
    """As a kernel takes it."""
    return np.uintp(array.ctypes.data)
