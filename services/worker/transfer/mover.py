"""TransferMover: the Mover over a Copier, CUDA's or its host twin.

    save ──▶ lane of saves ─┐
                            ├──▶ list of ended batches, and an eventfd ──▶ ended
    load ──▶ lane of loads ─┘

If the two directions of a link do not slow each other down, each has its lane, and no load waits for a save (an H200's
link: 55 GB/s in each direction, 102 in both at once). Otherwise one lane has both directions, and loads go first.
Between host memories two lanes copied no more in all, and a load took 1.6 to 2 times as long while saves ran.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from services.worker.contracts.mover import Copied, Copy, Slots
from services.worker.transfer.batch import CopyBatch
from services.worker.transfer.copier import Copier
from services.worker.transfer.lane import Lane
from shared.pool.format import PoolUnfit


class TransferMover:
    """A Mover that copies in threads. It owns its copier."""

    def __init__(
        self, copier: Copier, clock: Callable[[], float], *, most_blocks: int | None = None, verify: bool = False
    ) -> None:
        """Start the lanes. With `verify` every loaded block is compared with the pool's.

        `most_blocks` bounds a group; None means the copier's `group_blocks`.
        """
        self._copier = copier
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended_lock = threading.Lock()
        """Guards the list `_ended`, which the lanes fill."""
        self._ended: list[Copied] = []
        self._attached = self._released = False
        blocks = copier.group_blocks if most_blocks is None else most_blocks
        names = ("saves", "loads") if copier.duplex else ("copies",)
        lanes = [Lane(name, copier, blocks, clock, self._on_ended, verify=verify) for name in names]
        self._lanes = lanes
        self._saves, self._loads = lanes[0], lanes[-1]

    def attach(self, slots: Slots) -> None:
        """Set the pool to copy to and from. Raise PoolUnfit if a block is larger than a slot."""
        assert not self._attached
        block_bytes = self._copier.shape.block_bytes
        if slots.arena.slot_bytes < block_bytes:
            raise PoolUnfit(
                f"the pool's slots of {slots.arena.slot_bytes} bytes are too small for blocks of {block_bytes}"
            )
        self._copier.attach(slots)
        for lane in self._lanes:
            lane.attach(slots, prepares=lane is self._saves)
        self._attached = True

    def detach(self) -> None:
        """Let go of the pool, after the piece of it that is being prepared."""
        for lane in self._lanes:
            lane.attach(None, prepares=False)
        self._copier.detach()
        self._attached = False

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        """Queue a batch of saves; a copy begins when it is handed to the device."""
        self._saves.add(CopyBatch(batch, copies, loads=False, until_s=until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._loads.add(CopyBatch(batch, copies, loads=True))

    def release(self) -> None:
        """Free what the copier holds, while nothing is attached: the memory of the device's blocks is about to go."""
        assert not self._attached
        self._released = True
        self._copier.close()

    def renew(self, copier: Copier) -> None:
        """Copy with another copier, for the new memory of the same blocks, after `release`."""
        assert self._released
        self._released = False
        self._copier = copier
        for lane in self._lanes:
            lane.use(copier)

    def cancel(self, batch: int) -> None:
        for lane in self._lanes:
            lane.cancel(batch)

    def ended(self) -> list[Copied]:
        if not self._ended:  # a batch that ends now makes the descriptor readable
            return []
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        with self._ended_lock:
            ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        return self._wake

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        """End the lanes and close the copier, after the copies under way have ended."""
        for lane in self._lanes:
            lane.close()
        if not self._released:
            self._copier.close()
        os.close(self._wake)

    def _on_ended(self, copied: Copied) -> None:
        with self._ended_lock:
            self._ended.append(copied)  # before the descriptor is readable: `ended` looks here first
            if len(self._ended) == 1:  # otherwise it is readable, or `ended` is about to take this one too
                os.eventfd_write(self._wake, 1)
