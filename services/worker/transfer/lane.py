"""Lane: a thread that works through batches of copies one by one; loads go before saves.

engine's thread               the lane's thread
add       ──▶ two queues ────────▶ a group of copies is handed over ─┐ up to DEPTH groups at a time, so that the link
cancel    ──▶ drops what is not yet handed over                      │ never waits for Python
on_ended  ◀── the batch's last group has ended ◀──────── wait ───────┘

A group cannot be called back. So a new load waits for the groups of saves that are under way, not for a whole batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from services.worker.contracts.mover import Copied, Copy, Slots
from services.worker.transfer.batch import CopyBatch, GroupResult
from services.worker.transfer.copier import Copier, Pending
from shared.pool.format import PoolUnfit

DEPTH = 2
"""The most groups under way at once."""
NICENESS = 10
"""The nice value of a lane's thread, so that computing threads go first. On two busy cores, copies without a pause made
a decode step of the native CPU engine take 1.1 times as long; with a nice value of 0, 2.1 times."""

_log = logging.getLogger(__name__)


class _Group(Struct):
    batch: CopyBatch
    copies: Sequence[Copy]
    last: bool
    begun_s: float
    """Clock time when it was handed out."""
    pending: Pending | None = None


class Lane:
    """A thread that copies batches. Its caller bounds how many batches wait. It needs Linux."""

    def __init__(
        self,
        name: str,
        copier: Copier,
        group_blocks: int,
        clock: Callable[[], float],
        on_ended: Callable[[Copied], None],
        *,
        verify: bool,
    ) -> None:
        self._copier = copier
        self._group_blocks = group_blocks
        self._clock = clock
        self._on_ended = on_ended
        self._verify = verify
        self._logged_failure = self._logged_difference = False
        self._work = threading.Condition()
        """Guards all fields below. A batch's content belongs to the lane's thread, except for `cancelled`."""
        self._slots: Slots | None = None
        self._loads: deque[CopyBatch] = deque()
        self._saves: deque[CopyBatch] = deque()
        self._flying: deque[_Group] = deque()
        self._landed_s = 0.0
        """Clock time when a group ended last. It belongs to the lane's thread."""
        self._unready = False
        self._preparing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def attach(self, slots: Slots | None, *, prepares: bool) -> None:
        """Set the pool, or None for no pool. With `prepares` this lane prepares the pool while it has nothing to copy.

        Waits while a piece of the previous pool is being prepared.
        """
        with self._work:
            assert len(self._loads) + len(self._saves) + len(self._flying) == 0, "copies are under way"
            self._unready = False
            while self._preparing:
                self._work.wait()
            self._slots = slots
            self._unready = prepares
            self._work.notify_all()

    def use(self, copier: Copier) -> None:
        """Copy with another copier of the same blocks, while no pool is set."""
        with self._work:
            assert self._slots is None
            self._copier = copier

    def add(self, batch: CopyBatch) -> None:
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
        """End the thread, after the groups under way have ended; at most DEPTH are."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()

    # --- the lane's thread

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux this is the thread's own value
        while True:
            group = self._next_group() if len(self._flying) < DEPTH else None
            if group is not None:
                self._begin(group)
            elif self._flying:
                self._land(self._flying[0])
            elif self._closed:
                return
            elif self._unready:
                self._prepare()

    def _next_group(self) -> _Group | None:
        """Return the next group, or None if there is none and the thread has something else to do."""
        with self._work:
            while not (self._loads or self._saves or self._flying or self._unready or self._closed):
                self._work.wait()
            line = self._loads or self._saves
            if self._closed or not line:
                return None
        batch = line[0]  # only this thread removes batches
        now_s = self._clock()
        copies, last = batch.next_group(self._group_blocks, now_s)
        group = _Group(batch, copies, last, now_s)
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
                if not 0 <= copy.pool_slot < slots.arena.slots:  # another process named the slot
                    raise PoolUnfit(f"there is no slot {copy.pool_slot} in an arena of {slots.arena.slots} slots")
            if group.copies:
                group.pending = self._copier.begin(group.copies, loads=group.batch.loads)
        except Exception as wrong:  # noqa: BLE001 - the thread must outlive a failed batch
            self._fail(group.batch, wrong)

    def _land(self, group: _Group) -> None:
        """Wait for the oldest group and record its result."""
        batch = group.batch
        try:
            if group.pending is not None:
                group.pending.wait()
                landed, now_s = self._landed(group, group.pending), self._clock()
                # While the group before it was under way, that one had the link.
                batch.add_result(landed, now_s - max(group.begun_s, self._landed_s))
                self._landed_s = now_s
        except Exception as wrong:  # noqa: BLE001 - as in `_begin`
            self._fail(batch, wrong)
        with self._work:
            self._flying.popleft()
            if group.last and not self._closed:
                self._on_ended(batch.outcome(self._copier.shape.block_bytes))

    def _landed(self, group: _Group, pending: Pending) -> GroupResult:
        slots, copies = self._slots, group.copies
        assert slots is not None
        if not group.batch.loads:
            checksums = [self._checksum(slots, copy) for copy in copies if copy.checksum is not None]
            return GroupResult([True] * len(copies), pending.paths, pending.fallbacks, checksums=checksums)
        differs = self._copier.differs(copies) if self._verify else [False] * len(copies)
        damaged = [copy.checksum is not None and self._checksum(slots, copy) != copy.checksum for copy in copies]
        # Generations are read last: a slot that was overwritten meanwhile is stale, whatever was read or compared.
        same = [slots.generation(copy.pool_slot) == copy.generation for copy in copies]
        faults = [copy for copy, other, still in zip(copies, differs, same, strict=True) if other and still]
        if faults:
            self._log_difference(faults[0], pending)
        wrong = [place for place, (bad, still) in enumerate(zip(damaged, same, strict=True)) if bad and still]
        good = [still and not other and not bad for other, bad, still in zip(differs, damaged, same, strict=True)]
        return GroupResult(good, pending.paths, pending.fallbacks, len(faults), wrong)

    def _checksum(self, slots: Slots, copy: Copy) -> int:
        """Return the checksum of the block in the copy's pool slot."""
        at = copy.pool_slot * slots.arena.slot_bytes
        return xxh3_64_intdigest(slots.bytes[at : at + self._copier.shape.block_bytes])

    def _log_difference(self, copy: Copy, pending: Pending) -> None:
        if not self._logged_difference:
            _log.critical(
                "WRONG BYTES: after a load of the pool's slot %d into the device's slot %d, on one of the paths %s,"
                " their bytes differ; the block is computed instead. Further differences are counted, not logged",
                copy.pool_slot,
                copy.device_slot,
                ", ".join(pending.paths),
            )
        self._logged_difference = True

    def _fail(self, batch: CopyBatch, wrong: Exception) -> None:
        batch.failed = batch.failed or f"{type(wrong).__name__}: {wrong}"
        if not self._logged_failure:
            _log.exception("a batch of copies failed; further failures are reported without a traceback")
        self._logged_failure = True

    def _prepare(self) -> None:
        with self._work:
            if not self._unready:
                return
            self._preparing = True
        try:
            unready = self._copier.prepare()
        except Exception as wrong:  # noqa: BLE001 - as in `_begin`; copies then touch their pages themselves
            # Log the text only: a handler that keeps the exception would keep the pool mapped.
            _log.warning("the pool cannot be prepared beforehand, so copies are slower: %s", str(wrong))
            unready = False
        with self._work:
            self._preparing = False
            self._unready = unready and self._unready
            self._work.notify_all()
