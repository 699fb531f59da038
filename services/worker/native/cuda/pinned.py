"""Pinned host memory as NumPy arrays, for what goes between host and device without a wait."""

from __future__ import annotations

from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np


def pinned(count: int, dtype: Any) -> Any:
    """(count,) of `dtype`; what is there is anything. The array keeps the memory."""
    size_bytes = count * np.dtype(dtype).itemsize
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size_bytes), dtype, count)
