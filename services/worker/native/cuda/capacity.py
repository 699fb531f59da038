"""Shares out a GPU's memory between weights, the buffers of a step, and KV blocks; chooses the sizes of CUDA graphs.

total │ outside │ weights │ steps │ LoRAs │ blocks of KV    │ margin
      └────────────── memory_share of total ────────────────┘   other processes' memory and the margin stay free
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

from msgspec import Struct

from services.worker.config import ENCODER_CACHE_BYTES, LORA_BYTES, LORA_RANK, CudaConfig
from services.worker.limits import MAX_STEP_TOKENS
from services.worker.native.config import ModelConfig
from shared.errors import ModelError

OUTSIDE_BYTES = 1 << 30
"""The memory that a process takes in addition to its allocations: on an H200, 0.5 GiB for CUDA's context and 0.2 GiB
for kernels and 19 graphs."""
LORA_PART = 8
"""The memory for LoRAs is at most this part of what KV and LoRAs have together."""
MARGIN_BYTES = 512 << 20
"""The free memory that is left for later needs: kernels, graphs, and steps with LoRAs."""
MOST_BLOCKS = 1 << 20
"""The most blocks without a setting. More blocks of a tiny model would cost the scheduler more memory than the GPU."""
BLAS_BYTES = 64 << 20
"""cuBLAS's workspace. It asks for 32 MiB on Hopper; with less it falls back to slower kernels."""

_LEAST_SPLIT_PARTS = 512
Shape = tuple[int, ...]
Item = Literal["element", "float32", "int32"]
"""The type of an array; `element` is the type of weights and KV."""


def split_parts(running: int) -> int:
    """Return the most pieces into which the contexts of `running` sequences are cut, all together.

    It is enough for three thread blocks on each of 132 multiprocessors, where one piece is one block, and for the tail
    of a step of many.
    """
    return max(_LEAST_SPLIT_PARTS, 4 * running)


class CudaSizes(Struct, frozen=True, kw_only=True):
    """What bounds a runner on a GPU."""

    capacity_blocks: int
    first_blocks: int = 0
    """How many of its blocks it has until it has slept: enough for the first tokens. 0 means all."""
    block_size: int = 16
    max_running: int = 64
    """The most sequences of a step."""
    max_rows: int = MAX_STEP_TOKENS
    """The most rows of a step."""
    lora_rank: int = LORA_RANK
    lora_bytes: int = LORA_BYTES
    most_images: int = 0
    """The most images of a request. 0 means that the model takes none."""
    encoder_cache_bytes: int = ENCODER_CACHE_BYTES


class StepLimits(Struct, frozen=True):
    """The size of the largest step."""

    rows: int
    drawing: int
    """The most sequences that draw in a step, or only decode."""
    ints: int
    """The most integers of a step's layout."""
    positions: int
    """The most positions of a sequence."""
    ranks: int = 1
    """How many ranks add up what they compute of a layer."""


def step_arrays(config: ModelConfig, limits: StepLimits) -> dict[str, tuple[Shape, Item]]:
    """Return the shape and the type of each array of `Buffers`, by name."""
    rows, ropes = limits.rows, len(config.ropes)
    return {
        "hidden": ((rows, config.hidden), "float32"),
        "normed": ((rows, config.hidden), "element"),
        "qkv": ((rows, config.queries + 2 * config.keys), "float32"),
        "q": ((rows, config.queries), "element"),
        "q_rest": ((rows, config.queries), "element"),
        "added": ((rows if config.norms != "before" or limits.ranks > 1 else 1, config.hidden), "float32"),
        "attended": ((rows, config.queries), "element"),
        "gate_up": ((rows, 2 * config.intermediate), "float32"),
        "activated": ((rows, config.intermediate), "element"),
        "every_row": ((rows,), "int32"),
        "split_room": ((split_parts(limits.drawing) * config.heads * (config.head_dim + 2),), "float32"),
        "logits": ((limits.drawing, config.vocab), "float32"),
        "changed_logits": ((limits.drawing, config.vocab), "float32"),
        "token_counts": ((limits.drawing, config.vocab), "int32"),
        "ints": ((limits.ints,), "int32"),
        "cosines": ((ropes, limits.positions, config.head_dim // 2), "float32"),
        "sines": ((ropes, limits.positions, config.head_dim // 2), "float32"),
    }


def step_bytes(config: ModelConfig, limits: StepLimits, element_bytes: int) -> int:
    """Return the bytes that steps need in addition to weights and KV."""
    sizes: dict[Item, int] = {"element": element_bytes, "float32": 4, "int32": 4}
    return BLAS_BYTES + sum(prod(shape) * sizes[item] for shape, item in step_arrays(config, limits).values())


def weight_bytes(shapes: Mapping[str, Shape], element_bytes: int) -> int:
    """Return the bytes of weights whose matrices have the element type and whose vectors are float32."""
    return sum(prod(shape) * (element_bytes if len(shape) > 1 else 4) for shape in shapes.values())


class GpuRoom(Struct, frozen=True):
    """The sizes that are known before anything is allocated."""

    total_bytes: int
    free_bytes: int
    """The device's free memory after CUDA's context was made."""
    weight_bytes: int
    step_bytes: int
    lora_bytes: int = 0
    """The memory that is left for LoRAs."""

    def kv_bytes(self, share: float) -> int:
        """Return the bytes that are left for KV blocks if no setting says how many there are.

        The result is negative if weights and steps alone are too large.
        """
        taken = self.weight_bytes + self.step_bytes + self.lora_bytes
        return min(int(share * self.total_bytes) - OUTSIDE_BYTES, self.free_bytes - MARGIN_BYTES) - taken

    def lora_bytes_of(self, wanted_bytes: int, share: float) -> int:
        """Return the bytes to leave for LoRAs: what is wanted, but on a GPU that is nearly full at most LORA_PART of
        what KV would get without them."""
        return min(wanted_bytes, max(0, self.kv_bytes(share)) // LORA_PART)


def capacity(room: GpuRoom, *, blocks: int, kv_bytes: int, share: float, block_bytes: int, model: str) -> int:
    """Return the number of KV blocks: `blocks`, or as many as `kv_bytes` hold, or as many as the share leaves room for.

    Raise ModelError with all sizes if they do not fit, or not even one block fits.
    """
    if blocks or kv_bytes:
        asked = blocks or kv_bytes // block_bytes
        left_bytes = room.free_bytes - room.weight_bytes - room.step_bytes - room.lora_bytes
        advice = "lower capacity_blocks, capacity_bytes or lora_bytes, free the GPU, or serve a smaller model"
    else:
        left_bytes = room.kv_bytes(share)
        asked = max(1, min(left_bytes // block_bytes, MOST_BLOCKS))
        advice = "raise cuda.memory_share, free the GPU, or serve a smaller model"
    if asked < 1:
        raise ModelError(
            f"{model}: capacity_bytes {kv_bytes} holds no block of KV, which has {block_bytes} bytes; raise it"
        )
    if asked * block_bytes > left_bytes:
        raise ModelError(
            f"{model}: the GPU has no room for {asked} blocks of KV of {block_bytes} bytes: weights take"
            f" {room.weight_bytes}, a step {room.step_bytes}, LoRAs {room.lora_bytes}; of its {room.total_bytes} bytes"
            f" {room.free_bytes} are free, and cuda.memory_share is {share}; {advice}"
        )
    return asked


def graph_rows(settings: CudaConfig, max_running: int) -> tuple[int, ...]:
    """Return the numbers of rows for which a CUDA graph is captured, ascending.

    They are 1, 2, 4, then every 8 and above 256 every 32. The last one is the smaller of `graph_upper_bound` and
    `max_running`. Graphs that only steps below `graph_lower_bound` would use are left out.
    """
    lower, upper = settings.graph_lower_bound, min(settings.graph_upper_bound, max_running)
    if not settings.graphs or upper < lower:
        return ()
    return (*(rows for rows in (1, 2, 4, *range(8, 257, 8), *range(288, upper, 32)) if lower <= rows < upper), upper)
