"""x · Wᵀ, by whichever of two ways is faster on this machine for that many rows.

OpenBLAS's matrix-vector kernel reads weights at half the memory's speed on the CPUs we measured (16 of 33 GB/s on one
EPYC core), and its matrix kernel first copies them into its own order. `numpy.vecdot`, one BLAS dot product an output,
reads each weight row once from memory and reuses it from the cache for the other rows: twice as fast for one row,
1.7 times for four; from about eight rows on the matrix kernel wins. So the crossing is measured at start. The price:
the same row may differ in its last bits with the number of rows computed beside it, as it does within BLAS anyway.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any
"""An array of the module in use: numpy's, or later CuPy's."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiplies by row-major (outputs, inputs) weights."""

    xp: ModuleType
    dot_rows: int = 0
    """Up to this many rows, outputs are dot products (0: always a matrix product)."""

    def __call__(self, x: Array, weight: Array) -> Array:
        """(rows, inputs) · (outputs, inputs)ᵀ → (rows, outputs), contiguous."""
        rows = x.shape[0]
        if rows > self.dot_rows:
            # W · xᵀ: BLAS copies the smaller operand into its order less often this way (a quarter faster at 4 rows).
            return self.xp.ascontiguousarray(self.xp.matmul(weight, x.T).T)
        if rows == 1:
            return self.xp.vecdot(weight, x[0])[None]
        return self.xp.ascontiguousarray(self.xp.vecdot(weight[:, None], x[None]).T)


def calibrated(weights: Sequence[Array]) -> Linear:
    """The NumPy Linear whose crossing was measured on these weights, all of one shape.

    They are read in turn, so that most of them come from memory and not from a cache, as in a step.
    """
    dot_rows = 0
    for rows in (1, 2, 4, 6, 8):
        x = np.ones((rows, weights[0].shape[1]), np.float32)
        if _fastest_s(Linear(np, rows), x, weights) > _fastest_s(Linear(np, 0), x, weights):
            break
        dot_rows = rows
    return Linear(np, dot_rows)


def _fastest_s(linear: Linear, x: Array, weights: Sequence[Array]) -> float:
    """The best of a few rounds: other programs only ever make one slower."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for weight in weights:
            linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best
