"""Philox4x32-10: random numbers that are a function of (key, counter), as plain array arithmetic.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); test vectors in Random123. There is
no state: a request's seed and its number of tokens determine the next number, on any worker.
"""

from __future__ import annotations

from types import ModuleType

from services.worker.native.linear import Array

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, √3 - 1
_LOW = 0xFFFFFFFF


def philox(xp: ModuleType, counter: Array, key: Array) -> Array:
    """Apply ten rounds to counter (n, 4) and key (n, 2), u32 numbers in u64 arrays; return (n, 4) of the same."""
    low, half = xp.uint64(_LOW), xp.uint64(32)
    c0, c1, c2, c3 = (counter[:, column] for column in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(10):
        p0, p1 = c0 * xp.uint64(_MULTIPLIERS[0]), c2 * xp.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + xp.uint64(_KEY_STEPS[0])) & low, (k1 + xp.uint64(_KEY_STEPS[1])) & low
    return xp.stack([c0, c1, c2, c3], axis=1)


def uniform(xp: ModuleType, seeds: Array, draws: Array) -> Array:
    """Return a number of [0, 1) with 53 random bits for each u64 seed and index of the draw."""
    low, half = xp.uint64(_LOW), xp.uint64(32)
    nothing = xp.zeros_like(draws)
    counter = xp.stack([draws & low, draws >> half, nothing, nothing], axis=1)
    words = philox(xp, counter, xp.stack([seeds & low, seeds >> half], axis=1))
    return ((words[:, 0] << xp.uint64(21)) | (words[:, 1] >> xp.uint64(11))).astype(xp.float64) * 2.0**-53
