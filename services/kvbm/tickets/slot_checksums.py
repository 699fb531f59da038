"""SlotChecksums: what the bytes of one layout's slots were when they were written, as far as their writers say. Pure.

A slot has none from its grant on, until its writer commits it with one or the disk has brought a block whose record has
one. XXH3-64 of a block's bytes; 0: none is known.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

_BYTES = 8
assert sys.byteorder == "little", "the wire's order"


class SlotChecksums:
    """Of slots 0 … slots - 1."""

    def __init__(self, slots: int) -> None:
        self._of = array("Q", bytes(_BYTES * slots))
        assert self._of.itemsize == _BYTES

    def get(self, slot: int) -> int:
        """0: none is known."""
        return self._of[slot]

    def set(self, slot: int, checksum: int) -> None:
        """The slot has the bytes of this checksum."""
        self._of[slot] = checksum

    def clear(self, slots: Iterable[int]) -> None:
        """These are about to be written."""
        for slot in slots:
            self._of[slot] = 0

    def packed(self, slots: Sequence[int]) -> bytes:
        """Of these, as u64; empty where none of them is known."""
        checksums = array("Q", map(self._of.__getitem__, slots))
        return checksums.tobytes() if any(checksums) else b""
