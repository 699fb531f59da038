"""Two different blocks of 16 tokens with the same XXH3-64: why routing hashes never share bytes.

    python -m tests.forge        searches (seconds) and prints a pair

For inputs of 64 bytes XXH3-64 is (Yann Collet, xxHash specification, "XXH3, 17 to 128 bytes")

    avalanche(64 * PRIME64_1 + m0(t0…t3) + m1(t4…t7) + m2(t8…t11) + m3(t12…t15))     modulo 2^64

where each m folds a 128-bit product of four tokens, and the avalanche is a bijection. So two blocks a, b collide if

    m0(a0) + m1(a1) + m2(a2) + m3(a3) - m0(b0) - m1(b1) - m2(b2) - m3(b3) = 0

a generalised birthday problem with eight independent lists (D. Wagner, CRYPTO 2002): lists of 2^17 values, merged
pairwise so that 16, then 34, then all 64 low bits of the sum vanish. About 2^18 values remain at each level, and some
64 solutions at the end. Every token may be chosen freely, so all of them can be in any model's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.hashing import SEED

VOCABULARY = 49152
"""SmolLM2's; every token of a forged block is below it."""
_LIST_SIZE = 1 << 17
_LOW_BITS = (16, 34, 64)
"""Vanishing low bits of the sum after each level."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
)
_SECRET_OFFSETS = (0, 32, 48, 16)
"""Offsets of the four terms, in the order of the tokens."""

U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class _Sums:
    """Sums of one choice from each of some lists, and the choices."""

    sums: U64
    choices: list[NDArray[np.int64]]
    """One array of indices for each list."""


def forge(random_seed: int = 0) -> tuple[list[int], list[int]]:
    """Two different blocks of 16 token ids whose XXH3-64 with our seed is the same."""
    random = np.random.default_rng(random_seed)
    tokens = [random.integers(0, VOCABULARY, (_LIST_SIZE, 4), dtype=np.uint32) for _ in range(8)]
    level: list[_Sums] = []
    for index, quads in enumerate(tokens):
        terms = _term(quads, _SECRET_OFFSETS[index % 4])
        sums = terms if index < 4 else _negative(terms)
        level.append(_Sums(sums, [np.arange(_LIST_SIZE, dtype=np.int64)]))
    for bits in _LOW_BITS:
        level = [_merge(left, right, bits) for left, right in zip(level[::2], level[1::2], strict=True)]
    (solutions,) = level
    if not len(solutions.sums):
        raise ValueError(f"no pair for random seed {random_seed}")
    chosen = [tokens[index][choice[0]] for index, choice in enumerate(solutions.choices)]
    return np.concatenate(chosen[:4]).tolist(), np.concatenate(chosen[4:]).tolist()


def _term(quads: NDArray[np.uint32], offset: int) -> U64:
    """XXH3's mix16B of each row of four tokens."""
    words = quads.astype("<u4").view("<u8").astype(np.uint64)
    low_secret, high_secret = (int.from_bytes(_SECRET[at : at + 8], "little") for at in (offset, offset + 8))
    low = words[:, 0] ^ np.uint64((low_secret + SEED) % (1 << 64))
    high = words[:, 1] ^ np.uint64((high_secret - SEED) % (1 << 64))
    return _folded_product(low, high)


def _folded_product(x: U64, y: U64) -> U64:
    """Low half XOR high half of the 128-bit product."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> shift, y & mask, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    carried = x0 * y1 + (middle & mask)
    high = x1 * y1 + (middle >> shift) + (carried >> shift)
    return np.asarray(x * y ^ high, dtype=np.uint64)


def _negative(x: U64) -> U64:
    return np.asarray(~x + np.uint64(1), dtype=np.uint64)


def _merge(left: _Sums, right: _Sums, bits: int) -> _Sums:
    """Every pair whose sum has `bits` vanishing low bits."""
    mask = np.uint64((1 << bits) - 1)
    order = np.argsort(left.sums & mask, kind="stable")
    keys = (left.sums & mask)[order]
    wanted = _negative(right.sums) & mask
    begin = np.searchsorted(keys, wanted, "left")
    counts = np.searchsorted(keys, wanted, "right") - begin
    of_right = np.repeat(np.arange(len(wanted), dtype=np.int64), counts)
    first_of_run = np.repeat(np.cumsum(counts) - counts, counts)
    of_left = order[np.repeat(begin, counts) + np.arange(len(of_right), dtype=np.int64) - first_of_run]
    return _Sums(
        left.sums[of_left] + right.sums[of_right],
        [*(choice[of_left] for choice in left.choices), *(choice[of_right] for choice in right.choices)],
    )


FORGED = (
    [22711, 33405, 44791, 25381, 31481, 36330, 42647, 11748, 2887, 46128, 6544, 8871, 18636, 43982, 31471, 34653],
    [6745, 44828, 851, 27623, 38781, 38623, 46224, 27386, 13970, 23256, 13925, 42496, 41635, 31195, 31583, 47421],
)
"""A pair that `forge()` found."""


if __name__ == "__main__":
    for block in forge():
        print(block)
