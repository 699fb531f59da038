"""Computes x · Wᵀ in the faster of two ways for the machine and the number of rows.

OpenBLAS's matrix-vector kernel reads weights at half the memory's speed on the CPUs we measured (16 of 33 GB/s on one
EPYC core), and its matrix kernel first copies them into its own order. `numpy.vecdot`, one BLAS dot product an output,
reads each weight row once from memory and reuses it from the cache for the other rows. It is twice as fast for one row
and 1.7 times for four; from about eight rows on the matrix kernel wins. So the crossover is measured at start, by
`calibrate_linear`. The price: a row's last bits may depend on how many rows are computed with it, as within BLAS
anyway.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
"""An array of NumPy or of CuPy."""

_LINE_BYTES = 64
_CALIBRATION_BYTES = 128 << 20
"""Bytes of weights that are more than the caches of a CPU hold; they take about 0.1 s."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiplies by row-major (outputs, inputs) weights."""

    dot_rows: int = 0
    """The most rows for which outputs are dot products; 0 means always a matrix product."""

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return x (rows, inputs) · weight (outputs, inputs)ᵀ as (rows, outputs), contiguous."""
        rows = x.shape[0]
        if rows > self.dot_rows:
            # W · xᵀ: BLAS copies the smaller operand into its order less often this way (a quarter faster at 4 rows).
            return np.ascontiguousarray(np.matmul(weight, x.T).T)
        if rows == 1:
            return np.vecdot(weight, x[0])[None]
        return np.ascontiguousarray(np.vecdot(weight[:, None], _aligned(x)[None]).T)


def _aligned(x: Array) -> Array:
    """Return `x` from the start of a cache line on: a quarter faster, because rows are read from the cache."""
    if x.__array_interface__["data"][0] % _LINE_BYTES == 0:
        return x
    room = np.empty(x.nbytes + _LINE_BYTES, np.uint8)
    start = -room.__array_interface__["data"][0] % _LINE_BYTES
    moved = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def calibrate_linear(weights: Sequence[Array]) -> Linear:
    """Return a Linear whose crossover is measured on the first of these weights, all of one shape.

    The weights are read in turn, so that most of them come from memory and not from a cache, as in a step. Numbers of
    rows above one at which dot products have lost are tried too: they may have lost to another program.
    """
    weights = weights[: max(1, _CALIBRATION_BYTES // weights[0].nbytes)]
    dot_rows = 0
    for rows in (1, 2, 4, 6, 8):
        x = np.ones((rows, weights[0].shape[1]), np.float32)
        dots_s, matrices_s = _fastest_s((Linear(rows), Linear(0)), x, weights)
        if dots_s <= matrices_s:
            dot_rows = rows
    return Linear(dot_rows)


def _fastest_s(linears: Sequence[Linear], x: Array, weights: Sequence[Array]) -> list[float]:
    """Return each one's best of a few rounds, because other programs can only make a round slower; they take turns,
    because these come and go."""
    best = [float("inf")] * len(linears)
    for _ in range(3):
        for number, linear in enumerate(linears):
            start = time.perf_counter()
            for weight in weights:
                linear(x, weight)
            best[number] = min(best[number], time.perf_counter() - start)
    return best
