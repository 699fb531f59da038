"""How a GPU's memory is shared out: weights, what steps compute in, and for blocks of KV what is left. Pure arithmetic.

total │ outside │ weights │ steps │ blocks of KV            │ margin
      └────────────── memory_share of total ────────────────┘   and beside what others have, at least the margin
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

from msgspec import Struct

from services.worker.config import CudaConfig
from services.worker.native.config import ModelConfig
from shared.errors import ModelError

OUTSIDE_BYTES = 1 << 30
"""What a process takes beside all that it allocates: on an H200 0.5 GiB for CUDA's context, and 0.2 for kernels and 19
graphs."""
MARGIN_BYTES = 512 << 20
"""Of what is free when an engine starts, left for what comes later: kernels and graphs, and what calibration takes."""
MOST_BLOCKS = 1 << 20
"""Where no setting says: beyond, a tiny model's blocks would cost the scheduler more memory than the GPU."""
BLAS_BYTES = 64 << 20
"""cuBLAS asks for 32 MiB on Hopper; with less it falls back to slower kernels."""

_LEAST_SPLIT_PARTS = 512
Shape = tuple[int, ...]
Item = Literal["element", "float32", "int32"]
"""element: the type that is multiplied."""


def split_parts(running: int) -> int:
    """Into how many pieces the contexts of `running` sequences are cut at most, all together: enough for three thread
    blocks on each of 132 multiprocessors where one piece is one block, and for the tail of a step of many."""
    return max(_LEAST_SPLIT_PARTS, 4 * running)


class StepLimits(Struct, frozen=True):
    """The largest step."""

    rows: int
    drawing: int
    """Sequences that draw from it, or only decode."""
    ints: int
    """As `layout` has it."""
    positions: int


def step_arrays(config: ModelConfig, limits: StepLimits) -> dict[str, tuple[Shape, Item]]:
    """What a step computes in, by the names of `Buffers`."""
    rows = limits.rows
    return {
        "hidden": ((rows, config.hidden), "float32"),
        "normed": ((rows, config.hidden), "element"),
        "qkv": ((rows, config.queries + 2 * config.keys), "float32"),
        "q": ((rows, config.queries), "element"),
        "q_rest": ((rows, config.queries), "element"),
        "attended": ((rows, config.queries), "element"),
        "gate_up": ((rows, 2 * config.intermediate), "float32"),
        "activated": ((rows, config.intermediate), "element"),
        "every_row": ((rows,), "int32"),
        "split_room": ((split_parts(limits.drawing) * config.heads * (config.head_dim + 2),), "float32"),
        "logits": ((limits.drawing, config.vocab), "float32"),
        "ints": ((limits.ints,), "int32"),
        "cosines": ((limits.positions, config.head_dim // 2), "float32"),
        "sines": ((limits.positions, config.head_dim // 2), "float32"),
    }


def step_bytes(config: ModelConfig, limits: StepLimits, element_bytes: int) -> int:
    """All that steps need beside weights and KV."""
    sizes: dict[Item, int] = {"element": element_bytes, "float32": 4, "int32": 4}
    return BLAS_BYTES + sum(prod(shape) * sizes[item] for shape, item in step_arrays(config, limits).values())


def weight_bytes(shapes: Mapping[str, Shape], element_bytes: int) -> int:
    """Matrices are of the element type, vectors float32."""
    return sum(prod(shape) * (element_bytes if len(shape) > 1 else 4) for shape in shapes.values())


class GpuRoom(Struct, frozen=True):
    """What is known before anything is allocated."""

    total_bytes: int
    free_bytes: int
    """With CUDA's context there."""
    weight_bytes: int
    step_bytes: int

    def kv_bytes(self, share: float) -> int:
        """That are left to blocks where no setting says how many there are; below 0: weights and steps alone are too
        much."""
        taken = self.weight_bytes + self.step_bytes
        return min(int(share * self.total_bytes) - OUTSIDE_BYTES, self.free_bytes - MARGIN_BYTES) - taken


def capacity(room: GpuRoom, *, blocks: int, kv_bytes: int, share: float, block_bytes: int, model: str) -> int:
    """Blocks of KV: `blocks`, else as many as `kv_bytes` hold, else what the share leaves. Raises ModelError with all
    sizes where they do not fit, or not one of them does."""
    if blocks or kv_bytes:
        asked = blocks or kv_bytes // block_bytes
        left_bytes = room.free_bytes - room.weight_bytes - room.step_bytes
        advice = "lower capacity_blocks or capacity_bytes, free the GPU, or serve a smaller model"
    else:
        left_bytes = room.kv_bytes(share)
        asked = max(1, min(left_bytes // block_bytes, MOST_BLOCKS))
        advice = "raise cuda.memory_share, free the GPU, or serve a smaller model"
    if asked < 1:
        raise ModelError(f"{model}: capacity_bytes {kv_bytes} holds no block of KV, which has {block_bytes} bytes")
    if asked * block_bytes > left_bytes:
        raise ModelError(
            f"{model}: the GPU has no room for {asked} blocks of KV of {block_bytes} bytes: weights take"
            f" {room.weight_bytes}, a step {room.step_bytes}; of its {room.total_bytes} bytes {room.free_bytes} are"
            f" free, and cuda.memory_share is {share}; {advice}"
        )
    return asked


def graph_rows(settings: CudaConfig, max_running: int) -> tuple[int, ...]:
    """Rows of the graphs, ascending: 1, 2, 4, then every 8 and above 256 every 32, up to the smaller of
    `graph_upper_bound` and `max_running`, which is the last one itself. Those that only steps below
    `graph_lower_bound` would take are left out."""
    lower, upper = settings.graph_lower_bound, min(settings.graph_upper_bound, max_running)
    if not settings.graphs or upper < lower:
        return ()
    return (*(rows for rows in (1, 2, 4, *range(8, 257, 8), *range(288, upper, 32)) if lower <= rows < upper), upper)
