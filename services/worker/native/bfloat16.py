"""Conversions between float32 and bfloat16, its upper half, kept as 16-bit integers: NumPy and CuPy have no bfloat16.

The package ml_dtypes has the type, but nothing here needs its arithmetic: stored numbers are widened before use.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from services.worker.native.linear import Array


def to_bfloat16(xp: ModuleType, floats: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even; return uint16 of the same shape. NaN stays NaN."""
    bits = xp.ascontiguousarray(floats).view(xp.uint32)
    # Rounding carries into the upper half. In a NaN the carry could reach the sign and make it a zero.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return xp.where(floats == floats, rounded, 0x7FC0).astype(xp.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Return the numbers of uint16 `bits` as float32, of the same shape."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
