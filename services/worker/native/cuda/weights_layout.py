"""Where a model's matrices lie in device memory that engines share, one after the other. Pure.

    matrix │ pad │ matrix │ pad │ …        each begins at a multiple of 256 bytes, as memory of CUDA's own does

Engines of one layout take their matrices in the same order, so that the addresses agree. Norms and biases are not
there: they are small, and each engine has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod

import msgspec

ALIGNMENT_BYTES = 256
Shape = tuple[int, ...]
_FORMAT = "headrace cuda 1"
"""A part of every digest. Change it whenever the loader takes matrices in another order, or stores them otherwise."""


class WeightsLayout:
    """The layout of one model's matrices in one element type."""

    def __init__(self, shapes: Mapping[str, Shape], element_type: str, element_bytes: int) -> None:
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        said = (_FORMAT, element_type, element_bytes, sorted(matrices.items()))
        self.digest = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]
        self.size_bytes = sum(_aligned(prod(shape) * element_bytes) for shape in matrices.values())
        """Room for all of them: joined matrices take a little less."""
        self._end = 0

    def take(self, shape: Shape, item_bytes: int) -> int:
        """Return the offset of the next matrix."""
        start, self._end = self._end, self._end + _aligned(prod(shape) * item_bytes)
        assert self._end <= self.size_bytes, "the loader takes more than the checkpoint has"
        return start

    def begin(self) -> None:
        """Begin again with the first matrix."""
        self._end = 0


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
