"""bfloat16, the upper half of a float32, as 16-bit integers: neither NumPy nor CuPy computes with it.

A dependency (ml_dtypes) would bring the type, and no arithmetic that is wanted here: what is stored is widened before
it is used.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from services.worker.native.linear import Array


def to_bfloat16(xp: ModuleType, floats: Array) -> Array:
    """float32 → the nearest bfloat16, to even where two are as near; uint16 of the same shape. NaN stays NaN."""
    bits = xp.ascontiguousarray(floats).view(xp.uint32)
    # Rounding carries into the upper half; that of a NaN could carry on into the sign, and make it a zero.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return xp.where(floats == floats, rounded, 0x7FC0).astype(xp.uint16)


def from_bfloat16(bits: Array) -> Array:
    """uint16 → the same numbers as float32, of the same shape."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
