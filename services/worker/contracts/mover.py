"""Mover, which copies blocks between an engine's own memory and the pool of its machine's kvbm.

    save, load ──▶ waiting ──▶ copying, slot by slot ──▶ ended: reported once, with the result of each copy
                      └───────── cancel ─────┴───────────▲

A mover only copies. The kvbm tells the engine which slots to use, and until when. `services.worker.transfer.mover`
copies; `services.worker.simulated.mover` takes the time that copies would take. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from shared.pool.format import Arena


class Copy(Struct, frozen=True):
    """One block between a slot of the pool and one of the device."""

    pool_slot: int
    device_slot: int
    generation: int = 0
    """The generation that Fetched named for the pool's slot; used by loads."""
    checksum: int | None = None
    """A load compares the pool's slot with this checksum: where they differ, its bytes are damaged. For a save any
    number asks the mover to make one. None for neither."""


class Copied(Struct, frozen=True):
    """A batch has ended: none of its slots is read or written any longer."""

    batch: int
    good: list[bool]
    """For each copy whether it was made, and in time; for a load also whether its slot was still the same
    afterwards."""
    moved_bytes: int
    took_s: float
    """Seconds in which its copies were made, without those in which copies of a batch before it were. 0 if none was
    made."""
    failed: str = ""
    """The error that the mover met; no copy of the batch is good then."""
    paths: dict[str, int] = {}
    """Path that copies took → blocks copied."""
    fallbacks: dict[str, int] = {}
    """Name of a better path that failed before, with the reason → blocks copied."""
    differing: int = 0
    """Loads that were compared with the pool's slot and differ from it: a fault. None of them is good."""
    damaged: list[int] = []
    """Places in the batch of loads whose slot does not have the checksum that it must have. None of them is good."""
    checksums: list[int] = []
    """For a batch of saves that asked for checksums: one for each copy that was made, in order."""


class Slots(Protocol):
    """One layout's slots of the pool, as a mover needs them: `shared.pool.map.ArenaMap` is one."""

    @property
    def arena(self) -> Arena:
        """Where the slots lie in the pool's file."""
        ...

    @property
    def bytes(self) -> memoryview:
        """The bytes of all slots, one after the other; a simulated pool has none."""
        ...

    def generation(self, slot: int) -> int:
        """Return the slot's generation. Raise PoolUnfit if there is no such slot."""
        ...


class Mover(Protocol):
    """Copies batches. Belongs to one thread, the engine's."""

    def attach(self, slots: Slots) -> None:
        """Copy to and from these slots of the pool. No copy is under way, and no slots are attached. Raise PoolUnfit
        if they are too small."""
        ...

    def detach(self) -> None:
        """Leave the pool alone when this returns. No copy is under way."""
        ...

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        """Copy from the device to the pool. No copy begins at or after `until_s` by the engine's clock. `batch` names
        the batch."""
        ...

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        """Copy from the pool to the device, before saves that wait."""
        ...

    def cancel(self, batch: int) -> None:
        """Make no copy of the batch that has not begun. The batch still ends; an unknown or ended batch is ignored."""
        ...

    def ended(self) -> list[Copied]:
        """Return the batches that have ended since the last call, each exactly once."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `ended` would return a batch. -1 if there is none, see `ends_s`."""
        ...

    @property
    def ends_s(self) -> float | None:
        """When the next batch ends, by the engine's clock. None if not known, or none is under way."""
        ...

    def close(self) -> None:
        """Make no further copy, and report none."""
        ...
