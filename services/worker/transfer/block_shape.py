"""Where the bytes of a block lie on the device. Pure.

in the pool     | fragment 0 | fragment 1 | …                back to back
on the device   fragment f of slot i: regions[f] + i · stride_bytes

one super-block a slot    one region, a stride of the whole block       the native engine
layer-major               a region for each layer's keys and values     engines that keep a tensor a layer

A rank of a tensor-parallel group has the part of each block that belongs to its key-value heads. Its fragments lie
apart in the pool's slot, among those of other ranks (SlotPart).
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd

from msgspec import Struct

MOST_PITCH_BYTES = (1 << 31) - 1
"""The largest pitch of a 2-D copy, on all devices that we know (cudaDeviceProp.memPitch)."""


class SlotPart(Struct, frozen=True):
    """Where the fragments of a block lie in a slot of the pool: f at first_bytes + f · pitch_bytes. Fragments that lie
    back to back from the slot's beginning need none."""

    first_bytes: int
    pitch_bytes: int
    block_bytes: int
    """The bytes of whole blocks in the pool."""


class BlockShape(Struct, frozen=True):
    """The places of all blocks on one device, as the module's picture shows. Addresses and sizes are in bytes."""

    regions: tuple[int, ...]
    """The address of each fragment of slot 0."""
    fragment_bytes: int
    stride_bytes: int
    """The distance from one slot to the next, the same in each region."""
    slots: int

    @staticmethod
    def contiguous(at: int, block_bytes: int, slots: int) -> BlockShape:
        return BlockShape((at,), block_bytes, block_bytes, slots)

    @staticmethod
    def of_heads(at: int, rows: int, row_bytes: int, slots: int) -> BlockShape:
        """Return the shape of contiguous blocks of `rows` rows, each of which is a fragment of `row_bytes`."""
        regions = tuple(range(at, at + rows * row_bytes, row_bytes))
        return BlockShape(regions, row_bytes, rows * row_bytes, slots)

    @property
    def fragments(self) -> int:
        return len(self.regions)

    @property
    def block_bytes(self) -> int:
        return self.fragments * self.fragment_bytes

    @property
    def pitch_bytes(self) -> int | None:
        """The distance between a block's fragments; None if it varies or a 2-D copy does not support it."""
        if self.fragments == 1:
            return self.fragment_bytes
        steps = {after - before for before, after in pairwise(self.regions)}
        [step, *others] = steps
        return step if not others and self.fragment_bytes <= step <= MOST_PITCH_BYTES else None

    def word_bytes(self, alignment: int) -> int:
        """Return the widest word (16, 4 or 1 bytes) in which a kernel can move these blocks.

        `alignment`, in bytes, is that of the other end of each copy.
        """
        common = gcd(self.fragment_bytes, self.stride_bytes, alignment, *self.regions)
        return next(width for width in (16, 4, 1) if common % width == 0)

    def validate(self) -> None:
        """Raise AssertionError if the shape contradicts itself."""
        assert self.regions
        assert self.slots > 0
        assert 0 < self.fragment_bytes <= self.stride_bytes
        starts = sorted(self.regions)
        for before, after in pairwise(starts):
            # Regions lie apart, or a slot's fragments interleave within its stride.
            apart = after - before >= (self.slots - 1) * self.stride_bytes + self.fragment_bytes
            interleaved = after - before >= self.fragment_bytes and starts[-1] - starts[0] < self.stride_bytes
            assert apart or interleaved, "fragments overlap"
