"""A block's checksum, by which what was loaded is compared with the pool's slot. `checksum_kernel` is its twin.

    sum over i of fold((word i xor (i + 1) · STEP) · FACTOR), fold(x) = x xor x >> 32          all modulo 2^64

of the block's 64-bit words, little-endian, the last one padded with zeros. A word's term depends on its place, and on
each of its bits: one word that differs is always seen, more with all but a chance of 2^-64. Its parts may be added up
in any order. Against faults, not against an enemy.
"""

from __future__ import annotations

import numpy as np

STEP = 0x9E3779B97F4A7C15
FACTOR = 0xD6E8FEB86659FD93
"""Odd, so that no bit is lost."""
_MASK = (1 << 64) - 1
_WORDS = 32768
"""In one go: 256 KiB, which a core's cache holds through the six passes over them."""
_STEPS = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(STEP)


def block_checksum(block: memoryview) -> int:
    """Of contiguous bytes."""
    whole = len(block) // 8
    total = _sum(np.frombuffer(block, "<u8", whole), 0)
    if whole * 8 < len(block):
        last = bytes(block[whole * 8 :]).ljust(8, b"\0")
        total += _sum(np.frombuffer(last, "<u8"), whole)
    return total & _MASK


def _sum(words: np.ndarray, before: int) -> int:
    """Of words that stand behind so many others."""
    total = 0
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS]
        terms = _STEPS[: len(part)] + np.uint64((before + first) * STEP & _MASK)
        terms ^= part
        terms *= np.uint64(FACTOR)
        terms ^= terms >> np.uint64(32)
        total += int(terms.sum(dtype=np.uint64))
    return total
