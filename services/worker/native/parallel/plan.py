"""What the ranks of a group must know of a step: its tokens, and where their keys and values are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[PlannedWork])


def encode_plan(works: Sequence[Work], block_size: int) -> bytes:
    """Return the plan of a step."""
    return _encoder.encode([_planned(work, block_size) for work in works])


def decode_plan(plan: bytes | bytearray) -> list[PlannedWork]:
    """Return what `encode_plan` was given. Raise msgspec.DecodeError."""
    return _decoder.decode(plan)


def _planned(work: Work, block_size: int) -> PlannedWork:
    blocks = list(work.blocks[: -(-work.end // block_size)])
    return PlannedWork(work.sequence, work.start, work.end, list(work.tokens), blocks, work.draws)
