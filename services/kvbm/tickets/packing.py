"""Slots, keys and checksums as the wire packs them. Pure.

A slot's checksum is XXH3-64 of its block's bytes, or 0 if none is known. A slot has none from its grant on, until its
writer commits it with one, or the disk brings a block whose record has one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from services.kvbm.tickets.errors import BadRequest
from shared.blocks import Content
from shared.hashing import EXTRA_BYTES, KEY_BYTES, ContentKey
from shared.messages.kvbm import StoreBlock

LABEL_CHARS = 1024
"""The most characters of a LoRA's name or a salt: they are kept with each block, and each snapshot repeats them."""
_SLOT_BYTES = 4
_CHECKSUM_BYTES = 8
assert array("I").itemsize == _SLOT_BYTES
assert array("Q").itemsize == _CHECKSUM_BYTES
assert sys.byteorder == "little", "the wire's order, and that of every machine the pool's format is made for"


def pack_slots(slots: Sequence[int]) -> bytes:
    """Pack slots as u32."""
    return array("I", slots).tobytes()


def unpack_slots(packed: bytes) -> list[int]:
    """Unpack slots from u32. Raise BadRequest."""
    if len(packed) % _SLOT_BYTES:
        raise BadRequest(f"slots have {_SLOT_BYTES} bytes each: {len(packed)}")
    return array("I", packed).tolist()


def unpack_checksums(packed: bytes, count: int) -> list[int]:
    """Unpack the checksums of `count` slots, 0 for each if there are none. Raise BadRequest."""
    if not packed:
        return [0] * count
    if len(packed) != _CHECKSUM_BYTES * count:
        raise BadRequest(f"checksums of {count} slots have {_CHECKSUM_BYTES} bytes each: {len(packed)}")
    return array("Q", packed).tolist()


def unpack_keys(packed: bytes) -> Sequence[ContentKey]:
    """Unpack content keys, which follow one another. Raise BadRequest. Check their number first: `struct` caches what
    it compiles from a format, 40 bytes a key."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise BadRequest(f"content keys have {KEY_BYTES} bytes each: {len(packed)}")
    return struct.unpack(f"{KEY_BYTES}s" * count, packed)


def to_contents(blocks: Sequence[StoreBlock], block_size: int) -> list[Content]:
    """Convert blocks that a worker offers. Raise BadRequest if one does not have the tokens of a full block, or has
    a label that is too long, or more images than tokens; `Tickets` checks the keys."""
    size_bytes = 4 * block_size
    for block in blocks:
        if len(block.tokens) != size_bytes:
            raise BadRequest(f"block {block.key.hex()} has tokens of {len(block.tokens)} bytes, not {size_bytes}")
        if len(block.lora) > LABEL_CHARS or len(block.salt) > LABEL_CHARS:
            raise BadRequest(f"block {block.key.hex()} has a LoRA or salt of over {LABEL_CHARS} characters")
        if len(block.extra) % EXTRA_BYTES or len(block.extra) > EXTRA_BYTES * block_size:
            raise BadRequest(f"block {block.key.hex()} names its images with {len(block.extra)} bytes")
    return [Content(one.key, one.parent, one.tokens, one.lora, one.salt, one.extra) for one in blocks]


class SlotChecksums:
    """What the writers say about the bytes in the slots of one layout, 0 … slots - 1."""

    def __init__(self, slots: int) -> None:
        self._checksums = array("Q", bytes(_CHECKSUM_BYTES * slots))

    def get(self, slot: int) -> int:
        """Return the slot's checksum; 0 if none is known."""
        return self._checksums[slot]

    def set(self, slot: int, checksum: int) -> None:
        """Record the checksum of the bytes in the slot."""
        self._checksums[slot] = checksum

    def clear(self, slots: Iterable[int]) -> None:
        """Forget the checksums of slots that are about to be written."""
        for slot in slots:
            self._checksums[slot] = 0

    def packed(self, slots: Sequence[int]) -> bytes:
        """Return the checksums of these slots as u64; empty if none of them is known."""
        packed = array("Q", map(self._checksums.__getitem__, slots))
        return packed.tobytes() if any(packed) else b""
