"""What a back end does for the road between two kvbms' pools (`road.py`): it moves the bytes of blocks that are lent.
Two back ends: `sockets.py` and `nixl_reader.py`.

A back end that writes to a peer's pool, or has it read by hardware, keeps to the same promises:
- nothing is believed of a peer before `check_hello` and `check_layout` have passed for what it says of itself;
- a lender's slot is held until nothing on its way to a reader can read it any more;
- when `read` returns or raises, and also when it was cancelled, nothing writes to the reader's slots any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct, field

from services.kvbm.peers.connections import ReadParts
from services.kvbm.peers.messages import PeerAddress, PeerFault
from services.kvbm.peers.stream import PeerStream
from shared.messages.kvbm import StoreBlock, StoreLayout
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


class BorrowedBlocks(Struct, eq=False):
    """One read, after its blocks were lent: where they go, and what has come."""

    peer: PeerAddress
    layout: StoreLayout
    slots: ArenaMap
    stream: PeerStream
    """The connection on which they were borrowed."""
    parts: ReadParts
    epoch: int
    loan: int
    places: dict[int, int]
    """The slot of each block that is wanted, by its index in the loan; at least one."""
    written: dict[int, int] = field(default_factory=dict)
    """The slots whose blocks have come whole, with their XXH3-64."""
    fault: PeerFault | None = None
    """Why not all of them come, if not."""


class PeerBlockReader(Protocol):
    """One back end, as one kvbm reads with it."""

    async def prepare(self, peer: PeerAddress, parts: ReadParts) -> None:
        """Get what a read needs, before anything is borrowed for it. Raise PeerFault."""
        ...

    async def read(self, borrowed: BorrowedBlocks) -> None:
        """Read the blocks into their slots; note what came whole, or the fault. If the connection is in order
        afterwards, it is in `parts.whole`."""
        ...
