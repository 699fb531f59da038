"""What stores and fetches ask the connector to do; and `LinkLost`, which ends the link to a kvbm. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from services.worker.contracts.mover import Copy
from services.worker.kv_connector.contract import KvbmAsk
from shared.errors import HeadraceError
from shared.hashing import ContentKey, unpack_tokens


class SaveBatch(Struct, frozen=True):
    """Copy blocks from the device to the pool. No copy begins at or after `until_s`."""

    batch: int
    copies: Sequence[Copy]
    until_s: float


class LoadBatch(Struct, frozen=True):
    """Copy blocks to the device."""

    batch: int
    copies: Sequence[Copy]
    share: int = 0
    """The share that they belong to. 0 if they are in the pool."""


class CancelBatch(Struct, frozen=True):
    """Make no copy of the batch that has not begun. The batch still ends."""

    batch: int


class AskSharer(Struct, frozen=True):
    """Ask the engine of another worker to share blocks."""

    number: int
    """Names the share."""
    worker: str
    keys: Sequence[ContentKey]


class ReturnShare(Struct, frozen=True):
    """Nothing reads the blocks of this share any more."""

    number: int


Action = KvbmAsk | SaveBatch | LoadBatch | CancelBatch | AskSharer | ReturnShare


class LinkLost(HeadraceError):
    """Engine and kvbm may know different things of each other: what is under way ends, and the engine attaches
    again."""


def unpack_slots(packed: bytes, pool_slots: int) -> list[int]:
    """Return the slots that the kvbm named, of a pool with `pool_slots` slots. Raise LinkLost if the pool has no
    such slots, or if one comes twice."""
    try:
        slots = unpack_tokens(packed)
    except ValueError as wrong:
        raise LinkLost(str(wrong)) from None
    if len(set(slots)) != len(slots) or max(slots, default=0) >= pool_slots:
        raise LinkLost(f"the kvbm named slots beyond the pool's {pool_slots}, or one of them twice: {slots}")
    return slots
