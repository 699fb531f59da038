"""Slots and keys as the wire has them: packed, so that a request of hundreds of blocks is one value. Pure."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from services.kvbm.tickets.errors import BadRequest
from shared.blocks import Content
from shared.hashing import KEY_BYTES, ContentKey
from shared.kvbm_messages import StoreBlock

LABEL_CHARS = 1024
"""Of a LoRA's name or a salt, which are kept with each block, and told with each in a snapshot."""
_SLOT_BYTES = 4
_CHECKSUM_BYTES = 8
assert array("I").itemsize == _SLOT_BYTES
assert array("Q").itemsize == _CHECKSUM_BYTES
assert sys.byteorder == "little", "the wire's order, and that of every machine the pool's format is made for"


def pack_slots(slots: Sequence[int]) -> bytes:
    """As u32."""
    return array("I", slots).tobytes()


def unpack_slots(packed: bytes) -> list[int]:
    """The reverse. Raises BadRequest."""
    if len(packed) % _SLOT_BYTES:
        raise BadRequest(f"slots have {_SLOT_BYTES} bytes each: {len(packed)}")
    return array("I", packed).tolist()


def unpack_checksums(packed: bytes, count: int) -> list[int]:
    """Of so many slots; 0 for each where there are none. Raises BadRequest."""
    if not packed:
        return [0] * count
    if len(packed) != _CHECKSUM_BYTES * count:
        raise BadRequest(f"checksums of {count} slots have {_CHECKSUM_BYTES} bytes each: {len(packed)}")
    return array("Q", packed).tolist()


def unpack_keys(packed: bytes) -> Sequence[ContentKey]:
    """Content keys, one behind the other. Raises BadRequest. How many there are is looked at before: `struct` keeps
    what it makes of a format, 40 bytes a key."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise BadRequest(f"content keys have {KEY_BYTES} bytes each: {len(packed)}")
    return struct.unpack(f"{KEY_BYTES}s" * count, packed)


def to_contents(blocks: Sequence[StoreBlock], block_size: int) -> list[Content]:
    """What a worker could store. Raises BadRequest where one has not the tokens of a full block, or names without
    measure; keys are looked at by `Tickets`."""
    size_bytes = 4 * block_size
    for block in blocks:
        if len(block.tokens) != size_bytes:
            raise BadRequest(f"block {block.key.hex()} has tokens of {len(block.tokens)} bytes, not {size_bytes}")
        if len(block.lora) > LABEL_CHARS or len(block.salt) > LABEL_CHARS:
            raise BadRequest(f"block {block.key.hex()} has a LoRA or salt of over {LABEL_CHARS} characters")
    return [Content(block.key, block.parent, block.tokens, block.lora, block.salt) for block in blocks]


class SlotChecksums:
    """Of slots 0 … slots - 1."""

    def __init__(self, slots: int) -> None:
        self._checksums = array("Q", bytes(_CHECKSUM_BYTES * slots))

    def get(self, slot: int) -> int:
        """0: none is known."""
        return self._checksums[slot]

    def set(self, slot: int, checksum: int) -> None:
        """The slot has the bytes of this checksum."""
        self._checksums[slot] = checksum

    def clear(self, slots: Iterable[int]) -> None:
        """These are about to be written."""
        for slot in slots:
            self._checksums[slot] = 0

    def packed(self, slots: Sequence[int]) -> bytes:
        """Of these, as u64; empty where none of them is known."""
        packed = array("Q", map(self._checksums.__getitem__, slots))
        return packed.tobytes() if any(packed) else b""
