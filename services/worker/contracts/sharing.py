"""ShareReader and Sharer: engines of one machine that copy blocks from each other's devices, without a kvbm between
them.

    decode worker   ask ──▶ SharedSlots: some blocks … ──▶ load, each batch ends ──▶ release
    prefill worker                share: as soon as they are computed ◀──┘            └──▶ take_back

Nothing depends on a share: what is not shared, or not copied in time, comes from the kvbm or is computed.
`services.worker.sharing` has both. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy
from shared.hashing import ContentKey


class SharedSlots(Struct, frozen=True):
    """More blocks of a share."""

    number: int
    slots: list[int]
    """The sharer's slots of the blocks that follow those shared before."""
    last: bool
    """No further block will be shared."""


class ShareReader(Protocol):
    """Reads blocks from engines of the machine, and copies them. Belongs to the engine's thread."""

    def ask(self, number: int, owner: str, worker: str, keys: Sequence[ContentKey]) -> None:
        """Ask the engine of `worker` for these blocks, also those that it has not computed yet, for the engine that
        holds the lock of `owner`. Where that is not possible, the answer says so. Numbers ascend."""
        ...

    def turn(self) -> list[SharedSlots]:
        """Return the answers about shares that are not released. The last answer of each share is marked `last`."""
        ...

    def load(self, batch: int, number: int, copies: Sequence[Copy]) -> None:
        """Copy blocks of a share to this device; `pool_slot` is the sharer's slot. `batch` names the batch, and no
        other one of the engine."""
        ...

    def cancel(self, batch: int) -> None:
        """Make no copy of the batch that has not begun. The batch still ends; an unknown or ended batch is ignored."""
        ...

    def ended(self) -> list[Copied]:
        """Return the batches that have ended since the last call, each exactly once. None has `failed`."""
        ...

    def gone_sharers(self) -> list[str]:
        """Return the workers whose engines share nothing any more, since the last call: they ended, slept, failed, or
        were left for others. All copies from them have ended, and `ended` has returned them."""
        ...

    def release(self, number: int) -> None:
        """Give a share back. No copy that reads it is under way."""
        ...

    @property
    def wait_until_s(self) -> float | None:
        """Time of the next `turn` if no event comes first. None if none is needed."""
        ...

    def leave(self) -> None:
        """Let go of all other engines' memory, since this engine's blocks are about to go. No copy is under way."""
        ...

    def close(self) -> None:
        """Make no further copy, and let go of everything."""
        ...


class Sharer(Protocol):
    """Shares this engine's blocks with other engines of the machine. Belongs to the engine's thread."""

    def turn(self, owner: str, now_s: float) -> None:
        """Answer what other engines ask, and share what was computed since, as the holder of the lock `owner`. Empty
        if there is none yet, and nothing is shared."""
        ...

    def is_shared(self, key: ContentKey) -> bool:
        """Whether this block is the last one of a share: it was shared lately, or will be as soon as it is there."""
        ...

    @property
    def failing(self) -> bool:
        """The last try to begin to share failed; it tries again."""
        ...

    @property
    def failures(self) -> int:
        """How often it could not begin to share."""
        ...

    @property
    def wait_until_s(self) -> float | None:
        """Time of the next `turn` if no event comes first. None if none is needed."""
        ...

    def close(self) -> None:
        """Share nothing more, until the next `turn`: this engine's blocks are about to go."""
        ...
