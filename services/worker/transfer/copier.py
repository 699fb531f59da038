"""What a mover needs from a copier: CUDA's (`cuda_copier`), or its twin between host memories (`host_copier`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.worker.contracts.mover import Copy, Slots
from services.worker.transfer.block_shape import BlockShape

GROUP_BYTES = 32 << 20
"""The size of a group: 0.6 ms on an H200's link."""
GROUP_BLOCKS = 256
"""The most blocks in a group."""


def group_blocks(block_bytes: int) -> int:
    """Return how many blocks a lane hands to a GPU's copier at once."""
    return max(1, min(GROUP_BYTES // block_bytes, GROUP_BLOCKS))


class Pending(Protocol):
    """Copies that are under way. Their paths are known once `wait` has returned."""

    @property
    def paths(self) -> Mapping[str, int]:
        """Blocks copied on each path; the numbers add up to all blocks of the call."""
        ...

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Blocks for which a better path failed, by "PATH: reason". The texts are few, so that they can be labels."""
        ...

    def wait(self) -> None:
        """Wait until none of the blocks is read or written any more; other threads can run. Raise DeviceFailed."""
        ...


class Copier(Protocol):
    """Copies blocks between a device and a pool.

    Each direction belongs to one thread. `prepare` belongs to the thread of saves, the rest to the engine's thread.
    """

    @property
    def shape(self) -> BlockShape:
        """Where the device's blocks lie."""
        ...

    @property
    def duplex(self) -> bool:
        """Whether loads and saves hardly slow each other down; if so, each direction gets a thread of its own."""
        ...

    @property
    def group_blocks(self) -> int:
        """How many blocks to hand over at once. Twice as many can be under way when a cancel comes."""
        ...

    def attach(self, slots: Slots) -> None:
        """Set the pool to copy to and from."""
        ...

    def detach(self) -> None:
        """Let go of the pool. No copy may be under way."""
        ...

    def prepare(self) -> bool:
        """Prepare one more piece of the pool for later copies. Return False once all of it is prepared."""
        ...

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Pending:
        """Start copies, after all earlier ones of the same direction; among themselves they run in any order.

        Their slots must exist, and no slot is written twice. If DeviceFailed is raised, none of them is under way.
        """
        ...

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        """Say for each of these loads whether the device's block differs from the pool's.

        The loads have ended, and nothing else writes their device slots. Belongs to the thread that loads. Raises
        DeviceFailed.
        """
        ...

    def close(self) -> None: ...
