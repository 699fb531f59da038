"""The LoRAs that are loaded, and what they add to the products of a step.

    rows of a step    0  1  2  3  4 … 9                   y = x · Wᵀ + bias               for all rows together
    LoRA              a     b  a            then, for each LoRA    y[rows] += (x[rows] · Aᵀ) · Bᵀ · scale

Rows without a LoRA are not touched, so they have the same numbers as in the same step without LoRAs. Sums are float32,
whatever type the weights were converted from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.contracts.messages import EngineOperation
from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.lora_file import LoraLayers, LoraPair, read_lora
from services.worker.native.tensor_file import no_memory_as_model_error
from shared.errors import ModelError

LORA_OPERATIONS: tuple[EngineOperation, ...] = ("load_lora", "unload_lora")
"""The operations that `operate_loras` does."""
Rows = slice | NDArray[np.int64]
RowSpans = list[tuple[int, int]]
"""The first row of each span, and the row after its last."""


class LoraWork(Protocol):
    """What a LoRA's rows follow from: a Work, or what a rank of a tensor-parallel group hears of one."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def lora(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of a step that have one LoRA."""

    rows: Rows
    """A slice where they are next to one another."""
    layers: LoraLayers

    def add(self, y: Array, x: Array, layer: int, projection: str) -> None:
        """Add the LoRA's share of one product to `y` (rows, outputs), which was computed from `x` (rows, inputs)."""
        pair = self.layers[layer].get(projection)
        if pair is not None:
            y[self.rows] += (x[self.rows] @ pair.a.T) @ pair.b.T


def spans_by_lora(works: Sequence[LoraWork]) -> dict[str, RowSpans]:
    """Return the rows of each LoRA in a step; rows of works without one are left out."""
    spans: dict[str, RowSpans] = {}
    first = 0
    for work in works:
        end = first + work.end - work.start
        if work.lora:
            spans.setdefault(work.lora, []).append((first, end))
        first = end
    return spans


def joined_rows(spans: RowSpans) -> Rows:
    """Return the rows of spans, which are ascending."""
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return np.concatenate([np.arange(first, end) for first, end in spans])


class LoraStore:
    """The loaded LoRAs by their ids, within a bound of bytes."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        most_rank: int,
        most_bytes: int,
        place: Callable[[LoraLayers], LoraLayers] = lambda layers: layers,
    ) -> None:
        """Keep LoRAs of the model. `most_bytes` bounds all together, as float32. `place` takes a rank's part of one and
        moves it to the device; it raises ModelError if there is no room."""
        self._config = config
        self._most_rank = most_rank
        self._most_bytes = most_bytes
        self._place = place
        self._loaded: dict[str, LoraLayers] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes of all loaded LoRAs as float32."""
        return sum(_size_bytes(layers) for layers in self._loaded.values())

    def load(self, name: str, directory: Path) -> None:
        """Load a LoRA. Raise ModelError if it cannot be served."""
        if name in self._loaded:
            raise ModelError(f"{name} is loaded already")
        left_bytes = self._most_bytes - self.size_bytes
        with no_memory_as_model_error(directory, "this LoRA"):
            read = read_lora(directory, self._config, most_rank=self._most_rank, most_bytes=left_bytes)
            self._loaded[name] = self._place(read)

    def unload(self, name: str) -> None:
        """Free a LoRA. Raise ModelError if it is not loaded."""
        if self._loaded.pop(name, None) is None:
            raise ModelError(f"no LoRA {name} is loaded")

    def move(self, move: Callable[[Array], Array]) -> None:
        """Replace each matrix of all loaded LoRAs by what `move` makes of it; where it raises, none is replaced."""
        self._loaded = {
            name: tuple(
                {projection: LoraPair(move(pair.a), move(pair.b)) for projection, pair in layer.items()}
                for layer in layers
            )
            for name, layers in self._loaded.items()
        }

    def of(self, spans: Mapping[str, RowSpans]) -> list[LoraRows]:
        """Return the rows of each LoRA in a step, of which `spans_by_lora` gave the spans; all of them are loaded."""
        return [LoraRows(joined_rows(rows), self._loaded[name]) for name, rows in spans.items()]


def operate_loras(store: LoraStore, operation: str, name: str, path: str) -> str:
    """Load or unload a LoRA; return why it was not done, empty if it was."""
    try:
        if operation == "load_lora":
            store.load(name, Path(path))
        else:
            store.unload(name)
    except ModelError as wrong:
        return f"{operation}: {wrong}"
    return ""


def _size_bytes(layers: LoraLayers) -> int:
    pairs: list[LoraPair] = [pair for layer in layers for pair in layer.values()]
    return sum(4 * (prod(pair.a.shape) + prod(pair.b.shape)) for pair in pairs)
