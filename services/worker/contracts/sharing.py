"""Borrower and Lender: engines of one machine that copy blocks from each other's devices, without a kvbm between them.

    decode worker   ask ──▶ Borrowed: some blocks … ──▶ load, each batch ends ──▶ release
    prefill worker                lend: as soon as they are computed ◀──┘            └──▶ take_back

Nothing depends on a loan: what is not lent, or not copied in time, comes from the kvbm or is computed.
`services.worker.sharing` has both. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy
from shared.hashing import ContentKey


class Borrowed(Struct, frozen=True):
    """More blocks of a loan."""

    number: int
    slots: list[int]
    """The lender's slots of the blocks that follow those lent before."""
    last: bool
    """No further block will be lent."""


class Borrower(Protocol):
    """Borrows blocks from engines of the machine, and copies them. Belongs to the engine's thread."""

    def ask(self, number: int, owner: str, worker: str, keys: Sequence[ContentKey]) -> None:
        """Ask the engine of `worker` for these blocks, also those that it has not computed yet, for the engine that
        holds the lock of `owner`. Where that is not possible, the answer says so. Numbers ascend."""
        ...

    def turn(self) -> list[Borrowed]:
        """Return the answers about loans that are not released. The last answer of each loan is marked `last`."""
        ...

    def load(self, batch: int, number: int, copies: Sequence[Copy]) -> None:
        """Copy blocks of a loan to this device; `pool_slot` is the lender's slot. `batch` names the batch, and no other
        one of the engine."""
        ...

    def cancel(self, batch: int) -> None:
        """Make no copy of the batch that has not begun. The batch still ends; an unknown or ended batch is ignored."""
        ...

    def ended(self) -> list[Copied]:
        """Return the batches that have ended since the last call, each exactly once. None has `failed`."""
        ...

    def gone_lenders(self) -> list[str]:
        """Return the workers whose engines lend nothing any more, since the last call: they ended, slept, failed, or
        were left for others. All copies from them have ended, and `ended` has returned them."""
        ...

    def release(self, number: int) -> None:
        """Give a loan back. No copy that reads it is under way."""
        ...

    @property
    def wait_until_s(self) -> float | None:
        """When `turn` has something to do without any event; None: never."""
        ...

    def leave(self) -> None:
        """Let go of all other engines' memory, since this engine's blocks are about to go. No copy is under way."""
        ...

    def close(self) -> None:
        """Make no further copy, and let go of everything."""
        ...


class Lender(Protocol):
    """Lends this engine's blocks to other engines of the machine. Belongs to the engine's thread."""

    def turn(self, owner: str, now_s: float) -> None:
        """Answer what other engines ask, and lend what was computed since, as the holder of the lock `owner`; empty:
        there is none yet, and nothing is lent."""
        ...

    def is_borrowed(self, key: ContentKey) -> bool:
        """Whether this block is the last one of a loan: it was lent lately, or will be as soon as it is there."""
        ...

    @property
    def failing(self) -> bool:
        """The last try to begin to lend failed; it tries again."""
        ...

    @property
    def failures(self) -> int:
        """How often it could not begin to lend."""
        ...

    @property
    def wait_until_s(self) -> float | None:
        """When `turn` has something to do without any event; None: never."""
        ...

    def close(self) -> None:
        """Lend nothing more, until the next `turn`: this engine's blocks are about to go."""
        ...
