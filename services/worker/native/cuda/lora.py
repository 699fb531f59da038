"""LoRAs on the device: where they lie, and what they add to the products of a step.

    product of all rows ─▶ out (rows, outputs), float32
    rows of a LoRA of x ─▶ · Aᵀ in the element type, summed in float32 ─▶ · Bᵀ · scale in float32 ─▶ + out

Steps with a LoRA run eagerly: their kernels depend on the works. The kernels that all rows share are those of the
step's graph, so rows without a LoRA have the same numbers as in that graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cupy as cp  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import Dtype
from services.worker.native.bfloat16 import to_bfloat16
from services.worker.native.config import ModelConfig
from services.worker.native.cuda.blas import Blas
from services.worker.native.cuda.faults import no_room_as_model_error
from services.worker.native.cuda.weights import DTYPES
from services.worker.native.linear import Array
from services.worker.native.lora import LoraRows, Rows
from services.worker.native.lora_file import LoraLayers, LoraPair

QKV, OUTPUT, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)
"""The projections of each product, whose outputs are next to one another in this order."""
_PIECE_ROWS = 512
"""Most rows, not next to one another, that are gathered together: a step must find the memory for them."""


def place_lora(layers: LoraLayers, element_type: Dtype) -> LoraLayers:
    """Copy a LoRA to the current device: A in the element type, B in float32. Raise ModelError if there is no
    room."""

    def placed(pair: LoraPair) -> LoraPair:
        a = cp.asarray(pair.a)
        if element_type == "bfloat16":
            a = to_bfloat16(cp, a)
        return LoraPair(a.astype(DTYPES[element_type], copy=False), cp.asarray(pair.b))

    with no_room_as_model_error("lora_bytes", "this LoRA"):
        return tuple({name: placed(pair) for name, pair in layer.items()} for layer in layers)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one LoRA."""

    rows: slice | Array
    """On the device, if they are not next to one another."""
    layers: LoraLayers


class StepLoras:
    """The LoRAs of one step."""

    def __init__(self, config: ModelConfig, blas: Blas, loras: Sequence[LoraRows]) -> None:
        """Copy to the device which rows are whose. `loras` are what `place_lora` made."""
        self._blas = blas
        self._loras = [_Rows(rows, lora.layers) for lora in loras for rows in _pieces(lora.rows)]
        self._widths: Mapping[str, int] = {
            **{"q_proj": config.queries, "k_proj": config.keys, "v_proj": config.keys},
            **{"gate_proj": config.intermediate, "up_proj": config.intermediate},
            **{"o_proj": config.hidden, "down_proj": config.hidden},
        }

    def __bool__(self) -> bool:
        """Return whether any row of this step uses a LoRA."""
        return bool(self._loras)

    def add(self, out: Array, x: Array, layer: int, projections: Sequence[str], factor: float = 1.0) -> None:
        """Add the LoRAs' share of a product of x (rows, inputs), times the factor, to `out` (rows, outputs), which is
        float32."""
        for lora in self._loras:
            first = 0
            for name in projections:
                columns = slice(first, first + self._widths[name])
                first = columns.stop
                pair = lora.layers[layer].get(name)
                if pair is not None:
                    self._add_pair(out[:, columns], x, lora.rows, pair, factor)

    def _add_pair(self, out: Array, x: Array, rows: slice | Array, pair: LoraPair, factor: float) -> None:
        picked = x[rows]
        narrow = cp.empty((len(picked), len(pair.a)), np.float32)
        self._blas.product(narrow, picked, pair.a)
        if isinstance(rows, slice):
            self._blas.product(out[rows], narrow, pair.b, add=True, factor=factor)
            return
        share = cp.empty((len(picked), out.shape[1]), np.float32)
        self._blas.product(share, narrow, pair.b, factor=factor)
        out[rows] += share


def _pieces(rows: Rows) -> list[slice | Array]:
    """Return rows that are not next to one another on the device, in pieces."""
    if isinstance(rows, slice):
        return [rows]
    return [cp.asarray(rows[first : first + _PIECE_ROWS]) for first in range(0, len(rows), _PIECE_ROWS)]
