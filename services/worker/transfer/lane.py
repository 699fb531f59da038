"""Lane: batches of copies, one behind the other, in a thread of its own; loads go before saves.

engine's thread            the lane's thread
add     ──▶ two lines ──draw──▶ a group of copies is handed over ─┐ up to DEPTH groups at a time, so that the link
cancel  ──▶ what is not yet drawn goes                            │ never waits for Python
tell    ◀── the batch's last group has landed ◀──── wait ─────────┘

A group is what cannot be called back: a load that comes waits for as many saves, and not for the rest of a batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from services.worker.mover import Copied, Copy, Slots
from services.worker.transfer.batch import Batch, Landed
from services.worker.transfer.copier import Copier, Pending
from shared.pool.format import PoolUnfit

DEPTH = 2
NICENESS = 10
"""The thread's own: whoever computes goes first. Beside it, copying without a pause, a decode step of the native engine
on a CPU took 1.1 times as long on two cores that others kept busy; 2.1 times without it."""

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
        name: str,
        copier: Copier,
        group_blocks: int,
        clock: Callable[[], float],
        tell: Callable[[Copied], None],
        *,
        verify: bool,
    ) -> None:
        self._copier = copier
        self._group_blocks = group_blocks
        self._clock = clock
        self._tell = tell
        self._verify = verify
        self._complained = self._found_differing = False
        self._work = threading.Condition()
        """Guards all below; what is in a batch is the thread's alone, but for `cancelled`."""
        self._slots: Slots | None = None
        self._loads: deque[Batch] = deque()
        self._saves: deque[Batch] = deque()
        self._flying: deque[_Group] = deque()
        self._unready = False
        self._preparing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def attach(self, slots: Slots | None, *, prepares: bool) -> None:
        """The pool, or none. `prepares`: this lane readies it while there is nothing else to do. Waits for a piece of
        the one before it that is being readied."""
        with self._work:
            assert len(self._loads) + len(self._saves) + len(self._flying) == 0, "copies are under way"
            self._unready = False
            while self._preparing:
                self._work.wait()
            self._slots = slots
            self._unready = prepares
            self._work.notify_all()

    def add(self, batch: Batch) -> None:
        with self._work:
            assert self._slots is not None
            (self._loads if batch.loads else self._saves).append(batch)
            self._work.notify_all()

    def cancel(self, number: int) -> None:
        with self._work:
            for batch in (*self._loads, *self._saves):
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
            while not (self._loads or self._saves or self._flying or self._unready or self._closed):
                self._work.wait()
            line = self._loads or self._saves
            if self._closed or not line:
                return None
        batch = line[0]  # the thread alone takes from a line
        copies, last = batch.take(self._group_blocks, self._clock())
        group = _Group(batch, copies, last)
        with self._work:
            if last:
                line.popleft()
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
                group.pending = self._copier.begin(group.copies, loads=group.batch.loads)
        except Exception as wrong:  # noqa: BLE001 - a tier thread's edge: it must outlive any one batch
            self._fail(group.batch, wrong)

    def _land(self, group: _Group) -> None:
        """Waits for the oldest group."""
        batch = group.batch
        try:
            if group.pending is not None:
                group.pending.wait()
                batch.land(self._landed(group, group.pending), self._clock())
        except Exception as wrong:  # noqa: BLE001 - as in `_begin`
            self._fail(batch, wrong)
        with self._work:
            self._flying.popleft()
            if group.last and not self._closed:
                self._tell(batch.outcome(self._copier.shape.block_bytes))

    def _landed(self, group: _Group, pending: Pending) -> Landed:
        slots, copies = self._slots, group.copies
        assert slots is not None
        if not group.batch.loads:
            checksums = [self._checksum(slots, copy) for copy in copies if copy.checksum is not None]
            return Landed([True] * len(copies), pending.paths, pending.fallbacks, checksums=checksums)
        differs = self._copier.differs(copies) if self._verify else [False] * len(copies)
        damaged = [copy.checksum is not None and self._checksum(slots, copy) != copy.checksum for copy in copies]
        # Looked at last: a slot that others write to by now is only stale, whatever was read or compared of it.
        same = [slots.generation(copy.pool_slot) == copy.generation for copy in copies]
        faults = [copy for copy, other, still in zip(copies, differs, same, strict=True) if other and still]
        if faults:
            self._blame(faults[0], pending)
        wrong = [place for place, (bad, still) in enumerate(zip(damaged, same, strict=True)) if bad and still]
        good = [still and not other and not bad for other, bad, still in zip(differs, damaged, same, strict=True)]
        return Landed(good, pending.paths, pending.fallbacks, len(faults), wrong)

    def _checksum(self, slots: Slots, copy: Copy) -> int:
        """Of the block that lies in the pool's slot."""
        at = copy.pool_slot * slots.arena.slot_bytes
        return xxh3_64_intdigest(slots.bytes[at : at + self._copier.shape.block_bytes])

    def _blame(self, copy: Copy, pending: Pending) -> None:
        if not self._found_differing:
            _log.critical(
                "WRONG BYTES: the pool's slot %d, loaded into the device's slot %d on one of the paths %s, is not what"
                " lies there; it is computed instead, and so will be others, which are only counted",
                copy.pool_slot,
                copy.device_slot,
                ", ".join(pending.paths),
            )
        self._found_differing = True

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
        except Exception as wrong:  # noqa: BLE001 - as in `_begin`; copies then ready their pages themselves
            # Its text alone: who keeps the exception keeps the pool mapped.
            _log.warning("the pool is not readied beforehand, copies will be slower: %s", str(wrong))
            unready = False
        with self._work:
            self._preparing = False
            self._unready = unready and self._unready
            self._work.notify_all()
