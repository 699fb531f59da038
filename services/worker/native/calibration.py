"""Measures up to how many rows dot products beat the matrix product on this machine (linear.py says why)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from services.worker.native.linear import Array, Linear


def calibrate_linear(weights: Sequence[Array]) -> Linear:
    """Return a Linear whose crossover is measured on these weights, all of one shape.

    The weights are read in turn, so that most of them come from memory and not from a cache, as in a step.
    """
    dot_rows = 0
    for rows in (1, 2, 4, 6, 8):
        x = np.ones((rows, weights[0].shape[1]), np.float32)
        if _fastest_s(Linear(rows), x, weights) > _fastest_s(Linear(0), x, weights):
            break
        dot_rows = rows
    return Linear(dot_rows)


def _fastest_s(linear: Linear, x: Array, weights: Sequence[Array]) -> float:
    """Return the best of a few rounds, because other programs can only make a round slower."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for weight in weights:
            linear(x, weight)
        best = min(best, time.perf_counter() - start)
    return best
