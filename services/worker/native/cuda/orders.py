"""What rank 0 of a group on GPUs has the other ranks compute: a step as it is laid out, or logits of its rows.

    order    8 integers: kind, then its numbers        a step's integers, as `layout.py` made them

All ranks have as many heads, so a step is laid out the same for each of them. So rank 0 does that alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.native.cuda.layout import CudaStep, StepCounts

_HEADER = 8
_STEP, _LOGITS = 1, 2


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Compute a step."""

    step: CudaStep
    padded_rows: int
    """The rows of the graph that computes it; 0 if none does."""


@dataclass(frozen=True, slots=True)
class LogitsOrder:
    """Compute the logits of `rows` rows of the last step, from `first` on."""

    first: int
    rows: int


def encode_order(order: StepOrder | LogitsOrder) -> bytes:
    header = np.zeros(_HEADER, np.int32)
    if isinstance(order, LogitsOrder):
        header[:3] = _LOGITS, order.first, order.rows
        return header.tobytes()
    counts = order.step.counts
    header[:7] = _STEP, order.padded_rows, counts.rows, counts.drawing, counts.tiles, counts.singles, counts.splits
    return header.tobytes() + order.step.ints.tobytes()


def decode_order(message: bytes | bytearray) -> StepOrder | LogitsOrder:
    """Return what `encode_order` was given."""
    numbers = np.frombuffer(message, np.int32)
    kind, *rest = numbers[:_HEADER].tolist()
    if kind == _LOGITS:
        return LogitsOrder(rest[0], rest[1])
    assert kind == _STEP, f"order {kind}"
    return StepOrder(CudaStep(numbers[_HEADER:], StepCounts(*rest[1:6])), rest[0])
