"""What rank 0's copier says to those of the other ranks, and they answer: one packet each."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class AttachSlots(Struct, frozen=True, tag="attach"):
    """Map these slots of the pool, and hold the engine's lock next to it."""

    directory: str
    owner: str
    """The name of the lock, which the engine holds."""
    file: tuple[int, int]
    """The device and inode of the pool's file, as the engine has mapped it."""
    arena: tuple[int, int, int, int]
    """The fields of the Arena."""


class DetachSlots(Struct, frozen=True, tag="detach"):
    """Let go of the pool."""


class CopyBlocks(Struct, frozen=True, tag="copy"):
    """Copy this rank's part of blocks."""

    slots: list[tuple[int, int]]
    """The slot of each block in the pool, and that on the device."""


class CompareBlocks(Struct, frozen=True, tag="compare"):
    """Say for each of these blocks whether the device's part differs from the pool's."""

    slots: list[tuple[int, int]]


class CopyAnswer(Struct, frozen=True):
    """The order is carried out, or failed."""

    failed: str = ""
    differs: list[bool] = []
    fallbacks: dict[str, int] = {}


CopyOrder = AttachSlots | DetachSlots | CopyBlocks | CompareBlocks
_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[CopyOrder] = msgspec.msgpack.Decoder(CopyOrder)
_answers = msgspec.msgpack.Decoder(CopyAnswer)


def encode_copy_order(order: CopyOrder) -> bytes:
    return _encoder.encode(order)


def decode_copy_order(packet: bytes) -> CopyOrder:
    """Return an order. Raise msgspec.DecodeError."""
    return _orders.decode(packet)


def encode_answer(answer: CopyAnswer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(packet: bytes) -> CopyAnswer:
    """Return an answer. Raise msgspec.DecodeError."""
    return _answers.decode(packet)
