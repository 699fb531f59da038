"""Products of a few rows by few_products.cu, which reads the weights faster than cuBLAS does.

On an H200 cuBLAS reads the weights of an 8B model for 32 rows at two thirds of the memory's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from services.worker.native.linear import Array

OUTPUTS = 128
"""Outputs of a thread block."""
MOST_ROWS = 32
_STEP = 128
"""Inputs whose weights a thread reads ahead."""
_PIECE, _PADDING_BYTES = 1024, 64
"""Inputs of a row in shared memory at a time, and what is between two rows."""
_THREADS = 256
_BLOCKS_WANTED = 3
"""Thread blocks for each multiprocessor, above which clusters of four are enough."""
PARTS = (4, 8)
TILES = (1, 2, 4)


class Variant(NamedTuple):
    """Which of the kernels computes a product."""

    tiles: int
    """Its rows, in eights."""
    parts: int
    """Thread blocks of a cluster, each of which has a part of the inputs."""


def variant_of(rows: int, inputs: int, outputs: int, processors: int) -> Variant | None:
    """Return the kernel for a product on a GPU of `processors` multiprocessors; None if none is for it. *Pure.*"""
    if not 1 < rows <= MOST_ROWS or outputs % OUTPUTS:
        return None
    tiles = next(count for count in TILES if rows <= 8 * count)
    fitting = [parts for parts in PARTS if inputs % (parts * _STEP) == 0]
    if not fitting:
        return None
    few = outputs // OUTPUTS * fitting[0] < _BLOCKS_WANTED * processors
    return Variant(tiles, fitting[-1] if few else fitting[0])


def shared_bytes(variant: Variant, inputs: int) -> int:
    """Return the shared memory of a thread block: a piece of the rows, and at the end their sums. *Pure.*"""
    return 8 * variant.tiles * max(2 * min(_PIECE, inputs // variant.parts) + _PADDING_BYTES, 4 * OUTPUTS)


SHARED_BYTES = shared_bytes(Variant(TILES[-1], PARTS[0]), PARTS[0] * _PIECE)
"""The most shared memory of a thread block."""


@dataclass(frozen=True)
class FewProducts:
    """Enqueues products of a few rows on the current stream."""

    kernels: Mapping[Variant, Any]
    processors: int

    def compute(self, out: Array, x: Array, weight: Array, *, add: bool, factor: float) -> bool:
        """Compute a product as `Blas.product` does into float32 `out`; False if no kernel is for it."""
        (rows, inputs), outputs = x.shape, weight.shape[0]
        variant = variant_of(rows, inputs, outputs, self.processors)
        if variant is None:
            return False
        sizes = (np.int32(rows), np.int32(inputs), np.int32(outputs), np.int32(add), np.float32(factor))
        grid = (variant.parts, outputs // OUTPUTS)
        shared = shared_bytes(variant, inputs)
        self.kernels[variant](grid, (_THREADS,), (out, x, weight, *sizes), shared_mem=shared)
        return True

    def each(self, change: Callable[[Any], Any]) -> FewProducts:
        """Return the same with other kernels in place of these."""
        return replace(self, kernels={variant: change(kernel) for variant, kernel in self.kernels.items()})
