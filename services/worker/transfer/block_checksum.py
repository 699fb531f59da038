"""A block's checksum. A loaded block is compared with the pool's slot by it. `checksum_kernel` is its twin on a GPU.

    sum over i of fold((word i xor (i + 1) · STEP) · FACTOR), fold(x) = x xor x >> 32          all modulo 2^64

The words are the block's 64-bit words, little-endian, the last one padded with zeros. A word's term depends on its
place and on each of its bits. So a difference in one word is always found, and a difference in several words is missed
with a chance of 2^-64. The terms may be added up in any order. The checksum finds faults; it does not stop an attacker.
"""

from __future__ import annotations

import numpy as np

STEP = 0x9E3779B97F4A7C15
FACTOR = 0xD6E8FEB86659FD93
"""The factor of each term. It is odd, so that the product loses no bit."""
_MASK = (1 << 64) - 1
_WORDS = 32768
"""Words summed at once: 256 KiB, which a core's cache holds during the six passes over them."""
_STEPS = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(STEP)


def block_checksum(block: memoryview) -> int:
    """Return the checksum of a block; `block` is contiguous."""
    whole = len(block) // 8
    total = _sum(np.frombuffer(block, "<u8", whole), 0)
    if whole * 8 < len(block):
        last = bytes(block[whole * 8 :]).ljust(8, b"\0")
        total += _sum(np.frombuffer(last, "<u8"), whole)
    return total & _MASK


def _sum(words: np.ndarray, before: int) -> int:
    """Sum the terms of words that follow `before` other words of the block."""
    total = 0
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS]
        terms = _STEPS[: len(part)] + np.uint64((before + first) * STEP & _MASK)
        terms ^= part
        terms *= np.uint64(FACTOR)
        terms ^= terms >> np.uint64(32)
        total += int(terms.sum(dtype=np.uint64))
    return total
