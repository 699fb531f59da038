"""What rank 0 of a group on GPUs has the other ranks do: compute a step as it is laid out, or logits of its rows; or an
operation between two steps.

    order    8 integers: kind, then its numbers | a step's integers, as `layout.py` made them | the rows of its LoRAs

All ranks have as many heads, so a step is laid out the same for each of them. So rank 0 does that alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.worker.contracts.messages import Operate
from services.worker.native.cuda.layout import CudaStep, StepCounts
from services.worker.native.lora import RowSpans

_HEADER = 8
_ITEM_BYTES = 4
_STEP, _LOGITS, _OPERATION = 1, 2, 3
_encoder = msgspec.msgpack.Encoder()
_loras: msgspec.msgpack.Decoder[dict[str, RowSpans]] = msgspec.msgpack.Decoder(dict[str, RowSpans])
_operation = msgspec.msgpack.Decoder(Operate)


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Compute a step."""

    step: CudaStep
    padded_rows: int
    """The rows of the graph that computes it, if it has no LoRAs. 0 if none does."""
    loras: Mapping[str, RowSpans] = field(default_factory=dict)
    """The rows of each LoRA, as `spans_by_lora` gave them."""


@dataclass(frozen=True, slots=True)
class LogitsOrder:
    """Compute the logits of `rows` rows of the last step, from `first` on."""

    first: int
    rows: int


RankDuty = StepOrder | LogitsOrder | Operate
"""An operation has no ticket."""


def encode_order(order: RankDuty) -> bytes:
    header = np.zeros(_HEADER, np.int32)
    if isinstance(order, LogitsOrder):
        header[:3] = _LOGITS, order.first, order.rows
        return header.tobytes()
    if isinstance(order, Operate):
        header[0] = _OPERATION
        return header.tobytes() + _encoder.encode(order)
    counts, ints = order.step.counts, order.step.ints
    numbers = (counts.rows, counts.drawing, counts.tiles, counts.singles, counts.splits)
    header[:] = _STEP, order.padded_rows, *numbers, len(ints)
    return header.tobytes() + ints.tobytes() + _encoder.encode(order.loras)


def decode_order(message: bytes | bytearray) -> RankDuty:
    """Return what `encode_order` was given."""
    kind, *rest = np.frombuffer(message, np.int32, _HEADER).tolist()
    said = memoryview(message)[_ITEM_BYTES * _HEADER :]
    if kind == _LOGITS:
        return LogitsOrder(rest[0], rest[1])
    if kind == _OPERATION:
        return _operation.decode(said)
    assert kind == _STEP, f"order {kind}"
    padded_rows, *counts, length = rest
    ints = np.frombuffer(said, np.int32, length)
    return StepOrder(CudaStep(ints, StepCounts(*counts)), padded_rows, _loras.decode(said[ints.nbytes :]))
