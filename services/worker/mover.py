"""Copies between an engine's own memory and the pool of its machine's kvbm: what is asked of a mover, and told by it.

    save, load ──▶ waiting ──▶ copying, slot by slot ──▶ ended: told once, with what became of each copy
                      └───────── cancel ─────┴───────────▲

A mover only copies. Which slots, and until when, the engine has from the kvbm; `services.worker.transfer.mover`
copies, `services.worker.simulated.mover` takes the time that copies would take. Pure.
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
    """Of a load: what Fetched said of the pool's slot."""
    checksum: int | None = None
    """Of a load: what the pool's slot must have, else its bytes are damaged. Of a save: any number, and the mover makes
    one. None: neither."""


class Copied(Struct, frozen=True):
    """A batch has ended: nothing of it is read or written any more."""

    batch: int
    good: list[bool]
    """Of each copy: made, and in time; of a load also that its slot was still the same after it."""
    moved_bytes: int
    took_s: float
    """From its first copy's begin to its last one's end; 0: none was made."""
    failed: str = ""
    """What the mover stumbled over; no copy of the batch is good then."""
    paths: dict[str, int] = {}
    """Blocks that were copied, by the way they took …"""
    fallbacks: dict[str, int] = {}
    """… and those for which a better way failed before, by its name and the reason."""
    differing: int = 0
    """Loads that were compared with the pool's slot and found to be other than it: a fault, and none of them good."""
    damaged: list[int] = []
    """Loads, by their place in the batch, whose slot has not the checksum that it must have: none of them is good."""
    checksums: list[int] = []
    """Of a batch of saves that asked for them, one for each copy that was made, in order."""


class Slots(Protocol):
    """One layout's slots of the pool, as a mover needs them: `shared.pool.map.ArenaMap` is one."""

    @property
    def arena(self) -> Arena:
        """Where they lie."""
        ...

    @property
    def bytes(self) -> memoryview:
        """All of them, one behind the other; a simulated pool has none."""
        ...

    def generation(self, slot: int) -> int:
        """Raises PoolUnfit where there is no such slot."""
        ...


class Mover(Protocol):
    """Copies batches. Belongs to one thread, the engine's."""

    def attach(self, slots: Slots) -> None:
        """The pool to copy to and from. No copy is under way, and nothing is attached. Raises PoolUnfit where its slots
        are too small."""
        ...

    def detach(self) -> None:
        """The pool is left alone when this returns. No copy is under way."""
        ...

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        """Device → pool. No copy begins at or after `until_s` by the engine's clock. `batch` names it."""
        ...

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        """Pool → device; goes before saves that wait."""
        ...

    def cancel(self, batch: int) -> None:
        """Copies that have not begun are not made. The batch still ends; one that has ended or never was is ignored."""
        ...

    def ended(self) -> list[Copied]:
        """Those since the last call; each batch exactly once."""
        ...

    def fileno(self) -> int:
        """Readable when `ended` has something to tell; -1: there is no such thing, `ends_s` says when."""
        ...

    @property
    def ends_s(self) -> float | None:
        """When the next batch ends, by the engine's clock; None: nobody knows, or none is under way."""
        ...

    def close(self) -> None:
        """Copies that have not begun are never made, and nothing is told any more."""
        ...
