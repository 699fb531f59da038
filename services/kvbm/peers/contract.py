"""The road between two kvbms' pools, whatever moves the bytes. Two back ends: `sockets.py`
and `nixl_road.py`.

    register ──▶ describe ──▶ read … ──▶ gone

A back end that writes to a peer's pool, or has it read by hardware, keeps to the same promises:
- nothing is believed of a peer before `check_hello` and `check_layout` have passed for what it says of itself;
- a lender's slot is held until nothing on its way to a reader can read it any more;
- when `read` returns or raises, and also when it was cancelled, nothing writes to the reader's slots any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from services.kvbm.peers.messages import PeerAddress, PeerFault, PeerHello
from shared.hashing import ContentKey
from shared.kvbm_messages import StoreBlock, StoreLayout
from shared.pool.map import ArenaMap

PlaceBlocks = Callable[[Sequence[StoreBlock]], Sequence[int | None]]
"""Returns the slot for each of the blocks that a peer lends; None for one that is not wanted. Called once, or never."""


class ReadBlocks(Struct, frozen=True):
    """What came of a read."""

    written: dict[int, int]
    """The slots whose blocks came whole, with their XXH3-64."""
    lent: int
    """The number of blocks that the peer had."""
    took_s: float
    """Seconds in which the bytes came."""
    fault: PeerFault | None
    """Why not all of them came, if not."""


class PeerRoad(Protocol):
    """One back end, as one kvbm has it."""

    def register(self, layout: StoreLayout, slots: ArenaMap) -> None:
        """Make the slots of a layout readable by peers, and writable by `read`."""
        ...

    def unregister(self, digest: str) -> None:
        """Undo `register`: the layout's slots are unmapped next. Nothing reads or writes them."""
        ...

    def describe(self) -> PeerHello:
        """Return what a peer must know of this kvbm before it reads."""
        ...

    async def leading(self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], limit_s: float) -> int:
        """Return how many leading blocks the peer has in memory. Raise PeerFault."""
        ...

    async def read(
        self, peer: PeerAddress, layout: StoreLayout, keys: Sequence[ContentKey], place: PlaceBlocks, limit_s: float
    ) -> ReadBlocks:
        """Read the leading blocks of these keys that the peer has into the slots that `place` returns. Raise PeerFault
        where nothing was read."""
        ...

    def gone(self, instance: str) -> None:
        """End all that is under way with a peer that has left; its connections are closed."""
        ...

    async def close(self) -> None:
        """Give up all that the road has, after all reads."""
        ...
