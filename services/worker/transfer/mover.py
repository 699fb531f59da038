"""TransferMover: the Mover over a Copier, which may be CUDA's: loads and saves each go their own way, at the same time.

    save ──▶ lane of saves ─┐
                            ├──▶ what has ended, and an eventfd ──▶ ended
    load ──▶ lane of loads ─┘

So a load waits for no save: the link's two directions do not slow each other (55 GB/s each, 102 at once on an H200).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from services.worker.copies import Copied, Copy, Slots
from services.worker.transfer.batch import Batch
from services.worker.transfer.copier import Copier, group_blocks
from services.worker.transfer.lane import Lane
from shared.pool_format import PoolUnfit


class TransferMover:
    """A Mover; see the module. It owns the copier."""

    def __init__(self, copier: Copier, clock: Callable[[], float], *, most_blocks: int | None = None) -> None:
        """`most_blocks`: of a group; None: as many as `group_blocks` says."""
        self._copier = copier
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told = threading.Lock()
        """Guards what has ended."""
        self._ended: list[Copied] = []
        self._attached = False
        blocks = group_blocks(copier.shape.block_bytes) if most_blocks is None else most_blocks
        self._loads = Lane(copier, blocks, clock, self._tell, loads=True)
        self._saves = Lane(copier, blocks, clock, self._tell, loads=False)

    def attach(self, slots: Slots) -> None:
        """Raises PoolUnfit where a block is larger than a slot."""
        assert not self._attached
        block_bytes = self._copier.shape.block_bytes
        if slots.arena.slot_bytes < block_bytes:
            raise PoolUnfit(f"slots of {slots.arena.slot_bytes} bytes for blocks of {block_bytes}")
        self._copier.attach(slots)
        self._loads.attach(slots, prepares=False)
        self._saves.attach(slots, prepares=True)
        self._attached = True

    def detach(self) -> None:
        """Waits for the piece of the pool that is being readied."""
        self._loads.attach(None, prepares=False)
        self._saves.attach(None, prepares=False)
        self._copier.detach()
        self._attached = False

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        """A copy begins when it is handed to the device."""
        self._saves.add(Batch(batch, copies, until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._loads.add(Batch(batch, copies))

    def cancel(self, batch: int) -> None:
        self._loads.cancel(batch)
        self._saves.cancel(batch)

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
        self._loads.close()
        self._saves.close()
        self._copier.close()
        os.close(self._wake)

    def _tell(self, copied: Copied) -> None:
        with self._told:
            if not self._ended:  # else it is readable, or they are being taken, and this one with them
                os.eventfd_write(self._wake, 1)
            self._ended.append(copied)
