"""What the two lines of an exchange, stores and fetches, share: how they ask, and what ends the link. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from shared.errors import HeadraceError
from shared.hashing import unpack_hashes, unpack_tokens

Operation = Literal["attach", "store", "commit", "abort", "fetch", "release", "discard"]
Ask = Callable[[Operation, bytes], int]
"""Puts a request, as `shared.kvbm_messages` encodes it, to the kvbm; returns the number that its answers will have."""


class LinkLost(HeadraceError):
    """Engine and kvbm may know different things of each other: what is under way ends, and the engine attaches anew."""


def unpack_slots(packed: bytes, pool_slots: int) -> list[int]:
    """Slots that the kvbm named, of a pool with so many. Raises LinkLost where it has no such slots, or one comes
    twice."""
    try:
        slots = unpack_tokens(packed)
    except ValueError as wrong:
        raise LinkLost(str(wrong)) from None
    if len(set(slots)) != len(slots) or max(slots, default=0) >= pool_slots:
        raise LinkLost(f"slots that a pool of {pool_slots} has not, or twice the same: {slots}")
    return slots


def unpack_generations(packed: bytes, count: int) -> list[int]:
    """Of so many slots. Raises LinkLost."""
    return _unpack_numbers(packed, count, "generations")


def unpack_checksums(packed: bytes, count: int) -> list[int | None]:
    """Of so many slots; None where there is none. Raises LinkLost."""
    checksums = _unpack_numbers(packed, count, "checksums") if packed else [0] * count
    return [checksum or None for checksum in checksums]


def _unpack_numbers(packed: bytes, count: int, what: str) -> list[int]:
    try:
        numbers = unpack_hashes(packed)
    except ValueError as wrong:
        raise LinkLost(str(wrong)) from None
    if len(numbers) != count:
        raise LinkLost(f"{len(numbers)} {what} of {count} slots")
    return numbers
