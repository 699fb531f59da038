"""Lane: one direction's batches, one behind the other, in a thread of its own.

engine's thread            the lane's thread
add     ──▶ line ──draw──▶ a group of copies is handed over ─┐ up to DEPTH groups at a time, so that the link
cancel  ──▶ what is not yet drawn goes                       │ never waits for Python
tell    ◀── the batch's last group has landed ◀──── wait ────┘

A group is what cannot be called back: it is small enough to be copied within a millisecond.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from services.worker.copies import Copied, Copy, Slots
from services.worker.transfer.batch import Batch
from services.worker.transfer.copier import Copier, Pending
from shared.pool_format import PoolUnfit

DEPTH = 2
NICENESS = 10
"""The thread's own, as HostMover's: whoever computes goes first."""

_log = logging.getLogger(__name__)


class _Group(Struct):
    batch: Batch
    copies: Sequence[Copy]
    last: bool
    pending: Pending | None = None


class Lane:
    """See the module. How many batches wait is bounded by who asks. Linux."""

    def __init__(
        self,
        copier: Copier,
        group_blocks: int,
        clock: Callable[[], float],
        tell: Callable[[Copied], None],
        *,
        loads: bool,
    ) -> None:
        self._copier = copier
        self._group_blocks = group_blocks
        self._clock = clock
        self._tell = tell
        self._loads = loads
        self._complained = False
        self._work = threading.Condition()
        """Guards all below; what is in a batch is the thread's alone, but for `cancelled`."""
        self._slots: Slots | None = None
        self._line: deque[Batch] = deque()
        self._flying: deque[_Group] = deque()
        self._unready = False
        self._preparing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="loads" if loads else "saves", daemon=True)
        self._thread.start()

    def attach(self, slots: Slots | None, *, prepares: bool) -> None:
        """The pool, or none. `prepares`: this lane readies it while there is nothing else to do. Waits for a piece of
        the one before it that is being readied."""
        with self._work:
            assert len(self._line) + len(self._flying) == 0, "copies are under way"
            self._unready = False
            while self._preparing:
                self._work.wait()
            self._slots = slots
            self._unready = prepares
            self._work.notify_all()

    def add(self, batch: Batch) -> None:
        with self._work:
            assert self._slots is not None
            self._line.append(batch)
            self._work.notify_all()

    def cancel(self, number: int) -> None:
        with self._work:
            for batch in self._line:
                if batch.number == number:
                    batch.cancelled = True

    def close(self) -> None:
        """Waits for the groups under way, at most DEPTH."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()

    # --- the lane's thread

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # Linux: of this thread
        while True:
            group = self._draw() if len(self._flying) < DEPTH else None
            if group is not None:
                self._begin(group)
            elif self._flying:
                self._land(self._flying[0])
            elif self._closed:
                return
            elif self._unready:
                self._prepare()

    def _draw(self) -> _Group | None:
        """The next group; None: there is none, and something else to do."""
        with self._work:
            while not (self._line or self._flying or self._unready or self._closed):
                self._work.wait()
            if self._closed or not self._line:
                return None
            batch = self._line[0]
        copies, last = batch.take(self._group_blocks, self._clock())
        group = _Group(batch, copies, last)
        with self._work:
            if last:
                self._line.popleft()
            self._flying.append(group)
        return group

    def _begin(self, group: _Group) -> None:
        slots = self._slots
        assert slots is not None
        try:
            for copy in group.copies:
                assert 0 <= copy.device_slot < self._copier.shape.slots
                if not 0 <= copy.pool_slot < slots.arena.slots:  # another process named it
                    raise PoolUnfit(f"slot {copy.pool_slot} of an arena of {slots.arena.slots}")
            if group.copies:
                group.pending = self._copier.begin(group.copies, loads=self._loads)
        except Exception as wrong:  # noqa: BLE001 - a tier thread's edge: it must outlive any one batch
            self._fail(group.batch, wrong)

    def _land(self, group: _Group) -> None:
        """Waits for the oldest group."""
        batch, slots = group.batch, self._slots
        assert slots is not None
        try:
            if group.pending is not None:
                group.pending.wait()
                good = [not self._loads or slots.generation(copy.pool_slot) == copy.generation for copy in group.copies]
                batch.land(good, self._clock())
        except Exception as wrong:  # noqa: BLE001 - as in `_begin`
            self._fail(batch, wrong)
        with self._work:
            self._flying.popleft()
            if group.last and not self._closed:
                self._tell(batch.outcome(self._copier.shape.block_bytes))

    def _fail(self, batch: Batch, wrong: Exception) -> None:
        batch.failed = batch.failed or f"{type(wrong).__name__}: {wrong}"
        if not self._complained:
            _log.exception("a batch of copies failed; of others after it only the reason will be told")
        self._complained = True

    def _prepare(self) -> None:
        with self._work:
            if not self._unready:
                return
            self._preparing = True
        try:
            unready = self._copier.prepare()
        except Exception:  # noqa: BLE001 - as in `_begin`; copies then ready their pages themselves
            _log.exception("the pool cannot be readied beforehand")
            unready = False
        with self._work:
            self._preparing = False
            self._unready = unready and self._unready
            self._work.notify_all()
