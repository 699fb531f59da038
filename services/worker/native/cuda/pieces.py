"""Which parts of a model's tensors a matrix on the device is made of, for a whole model and for one rank.

q, k, v, gate, up    rows      a tensor each, or one tensor with all of them, one above the other
output, down         columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.native.config import ModelConfig
from services.worker.native.parallel.shares import Share

ALL = slice(None)


def _all() -> slice:
    return ALL


@dataclass(frozen=True, slots=True)
class Piece:
    """What is loaded of one tensor: all of it, or a range of its rows and one of a matrix's columns."""

    name: str
    rows: slice = field(default_factory=_all)
    columns: slice = field(default_factory=_all)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the piece's shape; `whole` is that of the tensor."""
        parts = zip((self.rows, self.columns), whole, strict=False)
        return tuple(len(range(*part.indices(size))) for part, size in parts)


class PiecesOfLayers:
    """The pieces of each layer's matrices, in the order in which they are joined."""

    def __init__(self, config: ModelConfig, share: Share | None) -> None:
        """`config` is that of the whole model; `share` is a rank's part, None for all of it."""
        size = config.head_dim
        self._config = config
        self._queries, self._keys, self._width = ALL, ALL, ALL
        if share is not None:
            self._queries = slice(share.heads.start * size, share.heads.stop * size)
            self._keys = slice(share.kv_heads.start * size, share.kv_heads.stop * size)
            self._width = share.intermediate

    def qkv(self, attention: str) -> list[Piece]:
        """Return those of the joined matrix of q, k and v; tensors' names begin with `attention`."""
        names = ("q_proj", "k_proj", "v_proj")
        sizes = (self._config.queries, self._config.keys, self._config.keys)
        return self._stacked(attention, "qkv_proj", names, (self._queries, self._keys, self._keys), sizes)

    def qkv_bias(self, attention: str) -> list[Piece]:
        rows = (self._queries, self._keys, self._keys)
        return [Piece(f"{attention}{name}_proj.bias", part) for name, part in zip("qkv", rows, strict=True)]

    def output(self, attention: str) -> Piece:
        return Piece(f"{attention}o_proj.weight", columns=self._queries)

    def gate_up(self, stem: str) -> list[Piece]:
        """Return those of the joined matrix of gate and up; tensors' names begin with `stem`."""
        names, sizes = ("gate_proj", "up_proj"), (self._config.intermediate,) * 2
        return self._stacked(f"{stem}mlp.", "gate_up_proj", names, (self._width, self._width), sizes)

    def down(self, stem: str) -> Piece:
        return Piece(f"{stem}mlp.down_proj.weight", columns=self._width)

    def _stacked(
        self, stem: str, fused: str, names: Sequence[str], rows: Sequence[slice], sizes: Sequence[int]
    ) -> list[Piece]:
        """Return the rows of matrices, which are stored by themselves or one above the other as `fused`."""
        if not self._config.fused:
            return [Piece(f"{stem}{name}.weight", part) for name, part in zip(names, rows, strict=True)]
        if all(part == ALL for part in rows):
            return [Piece(f"{stem}{fused}.weight")]
        found, first = [], 0
        for part, size in zip(rows, sizes, strict=True):
            found.append(Piece(f"{stem}{fused}.weight", slice(first + part.start, first + part.stop)))
            first += size
        return found
