"""StepMover: a TransferMover's twin without threads. It goes on by one block each time the test says so, so that
anything may happen between a block's bytes and the look at its slot's generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from services.worker.contracts.mover import Copied, Copy, Slots
from services.worker.transfer.batch import CopyBatch, GroupResult
from services.worker.transfer.host_copier import HostCopier


class StepMover:
    """A Mover whose batches go on when `go_on` is called, in any order."""

    def __init__(self, copier: HostCopier, clock: Callable[[], float]) -> None:
        self._copier = copier
        self._clock = clock
        self._slots: Slots | None = None
        self._batches: list[CopyBatch] = []
        self._copied: dict[int, tuple[Copy, bool]] = {}
        """Batch → the block whose bytes were copied, and whether it is the last one; its slot is looked at next."""
        self._ended: list[Copied] = []
        self.trouble = ""
        """Why the next batch that goes on fails. Empty if it does not."""

    def attach(self, slots: Slots) -> None:
        assert self._slots is None
        self._copier.attach(slots)
        self._slots = slots

    def detach(self) -> None:
        assert not self._batches, "copies are under way"
        self._copier.detach()
        self._slots = None

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        assert self._slots is not None
        self._batches.append(CopyBatch(batch, copies, loads=False, until_s=until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        assert self._slots is not None
        self._batches.append(CopyBatch(batch, copies, loads=True, until_s=inf))

    def cancel(self, batch: int) -> None:
        for waiting in self._batches:
            if waiting.number == batch:
                waiting.cancelled = True

    def ended(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        return -1

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._batches.clear()
        self._copied.clear()
        self._copier.close()

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._batches

    def go_on(self, pick: int) -> None:
        """Copy the bytes of one block, or look at the generation of one whose bytes were copied."""
        if not self._batches:
            return
        batch, slots = self._batches[pick % len(self._batches)], self._slots
        assert slots is not None
        if self.trouble:
            batch.failed, self.trouble = self.trouble, ""
            self._copied.pop(batch.number, None)
            self._end(batch)
            return
        if batch.number in self._copied:
            copy, last = self._copied.pop(batch.number)
            good = not batch.loads or slots.generation(copy.pool_slot) == copy.generation
            batch.add_result(GroupResult([good]), 0.0)
        else:
            copies, last = batch.next_group(1, self._clock())
            if copies:
                self._copier.begin(copies, loads=batch.loads)
                self._copied[batch.number] = copies[0], last
                return
        if last:
            self._end(batch)

    def _end(self, batch: CopyBatch) -> None:
        self._batches.remove(batch)
        self._ended.append(batch.outcome(self._copier.shape.block_bytes))
