"""TransferMover: the Mover over a Copier, which may be CUDA's.

    save ──▶ lane of saves ─┐
                            ├──▶ what has ended, and an eventfd ──▶ ended
    load ──▶ lane of loads ─┘

Where a link has two directions that do not slow each other, each has its lane (an H200's: 55 GB/s each, 102 at once),
and no load waits for a save. Elsewhere one lane has both, and loads go first: between host memories two lanes made no
more copies in all, and a load beside saves took 1.6 to 2 times as long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from services.worker.mover import Copied, Copy, Slots
from services.worker.transfer.batch import Batch
from services.worker.transfer.copier import Copier
from services.worker.transfer.lane import Lane
from shared.pool.format import PoolUnfit


class TransferMover:
    """A Mover; see the module. It owns the copier."""

    def __init__(
        self, copier: Copier, clock: Callable[[], float], *, most_blocks: int | None = None, verify: bool = False
    ) -> None:
        """`most_blocks`: of a group; None: as many as the copier says. `verify`: what was loaded is compared."""
        self._copier = copier
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told = threading.Lock()
        """Guards what has ended."""
        self._ended: list[Copied] = []
        self._attached = False
        blocks = copier.group_blocks if most_blocks is None else most_blocks
        names = ("saves", "loads") if copier.duplex else ("copies",)
        lanes = [Lane(name, copier, blocks, clock, self._tell, verify=verify) for name in names]
        self._lanes = lanes
        self._saves, self._loads = lanes[0], lanes[-1]

    def attach(self, slots: Slots) -> None:
        """Raises PoolUnfit where a block is larger than a slot."""
        assert not self._attached
        block_bytes = self._copier.shape.block_bytes
        if slots.arena.slot_bytes < block_bytes:
            raise PoolUnfit(f"slots of {slots.arena.slot_bytes} bytes for blocks of {block_bytes}")
        self._copier.attach(slots)
        for lane in self._lanes:
            lane.attach(slots, prepares=lane is self._saves)
        self._attached = True

    def detach(self) -> None:
        """Waits for the piece of the pool that is being readied."""
        for lane in self._lanes:
            lane.attach(None, prepares=False)
        self._copier.detach()
        self._attached = False

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        """A copy begins when it is handed to the device."""
        self._saves.add(Batch(batch, copies, loads=False, until_s=until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._loads.add(Batch(batch, copies, loads=True))

    def cancel(self, batch: int) -> None:
        for lane in self._lanes:
            lane.cancel(batch)

    def ended(self) -> list[Copied]:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        with self._told:
            told, self._ended = self._ended, []
        return told

    def fileno(self) -> int:
        return self._wake

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        """Waits for the copies under way."""
        for lane in self._lanes:
            lane.close()
        self._copier.close()
        os.close(self._wake)

    def _tell(self, copied: Copied) -> None:
        with self._told:
            if not self._ended:  # else it is readable, or they are being taken, and this one with them
                os.eventfd_write(self._wake, 1)
            self._ended.append(copied)
