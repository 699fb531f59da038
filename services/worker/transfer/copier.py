"""What a mover needs of a copier: CUDA's (`cuda_copier`), or its twin between host memories (`host_copier`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.worker.mover import Copy, Slots
from services.worker.transfer.block_shape import BlockShape

GROUP_BYTES = 32 << 20
"""0.6 ms of an H200's link."""
GROUP_BLOCKS = 256


def group_blocks(block_bytes: int) -> int:
    """How many blocks a GPU's copier is handed in one go."""
    return max(1, min(GROUP_BYTES // block_bytes, GROUP_BLOCKS))


class Pending(Protocol):
    """Copies that were handed over. What they took is known once they have been waited for."""

    @property
    def paths(self) -> Mapping[str, int]:
        """Blocks by the way they took; together all that were handed over."""
        ...

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Blocks for which a better way failed before, by "WAY: reason"; few words, so that they can be counted by."""
        ...

    def wait(self) -> None:
        """Until none of them is read or written any more; other threads run meanwhile. Raises DeviceFailed."""
        ...


class Copier(Protocol):
    """Copies blocks. Each direction belongs to one thread, `prepare` to that of saves, the rest to the engine's."""

    @property
    def shape(self) -> BlockShape:
        """Of the device's slots."""
        ...

    @property
    def duplex(self) -> bool:
        """Whether loads and saves hardly slow each other: each direction then has a thread of its own."""
        ...

    @property
    def group_blocks(self) -> int:
        """How many blocks to hand over in one go: of as many, twice, a cancel waits for the end."""
        ...

    def attach(self, slots: Slots) -> None:
        """The pool to copy to and from."""
        ...

    def detach(self) -> None:
        """No copy is under way."""
        ...

    def prepare(self) -> bool:
        """Readies one more piece of the pool, for copies that come. False: there is nothing left to ready."""
        ...

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Pending:
        """Hands copies over, after those of the same direction; among themselves they are made in any order. Their
        slots exist, and none is written twice. Raises DeviceFailed, and then none of them is under way."""
        ...

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        """Of loads that have been waited for, and whose slots nobody else writes: whether the device's block is other
        than the pool's. Belongs to the thread that loads. Raises DeviceFailed."""
        ...

    def close(self) -> None: ...
