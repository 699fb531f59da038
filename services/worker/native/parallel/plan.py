"""What the ranks of a group must know of a step: its tokens, and where their keys and values are. Or the operation
that they are to do between two steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from services.worker.contracts.messages import Operate
from services.worker.contracts.runner import Work


class PlannedWork(Struct, frozen=True, array_like=True):
    """What a rank computes of a Work; its fields are those of Work that the decoder reads."""

    sequence: int
    start: int
    end: int
    tokens: list[int]
    blocks: list[int]
    """The slots up to the last position."""
    draws: bool
    lora: str


Plan = list[PlannedWork] | Operate
"""What a rank hears: the works of a step, or an operation, which has no ticket."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Plan] = msgspec.msgpack.Decoder(Plan)


def encode_plan(works: Sequence[Work], block_size: int) -> bytes:
    """Return the plan of a step."""
    return _encoder.encode([_planned(work, block_size) for work in works])


def encode_operation(order: Operate) -> bytes:
    return _encoder.encode(order)


def decode_plan(plan: bytes | bytearray) -> Plan:
    """Return what `encode_plan` or `encode_operation` was given. Raise msgspec.DecodeError."""
    return _decoder.decode(plan)


def _planned(work: Work, block_size: int) -> PlannedWork:
    blocks = list(work.blocks[: -(-work.end // block_size)])
    return PlannedWork(work.sequence, work.start, work.end, list(work.tokens), blocks, work.draws, work.lora)
