"""Pinned host memory as NumPy arrays: kernels read and write it where it is, and copies of it need nobody to wait."""

from __future__ import annotations

from typing import Any

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np


def pinned(count: int, dtype: Any) -> Any:
    """(count,) of `dtype`, aligned to 256 bytes; what is there is anything. The array keeps the memory."""
    size_bytes = count * np.dtype(dtype).itemsize
    return np.frombuffer(cp.cuda.alloc_pinned_memory(size_bytes), dtype, count)


def address(array: Any) -> np.uintp:
    """As a kernel takes it."""
    return np.uintp(array.ctypes.data)
