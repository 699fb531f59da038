"""HostMover: copies blocks between an engine's memory and the pool, both host memory, in a thread of its own.

engine's thread                               the mover's thread, while there is something to do:
load, save ──▶ two lines of batches  ───────▶   the next copy of a load, else of a save, else it touches a piece
cancel     ──▶ what has not begun goes            of the pool; the GIL is free while bytes move
ended      ◀── batches that have ended, and an eventfd ◀──╯
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from msgspec import Struct, field

from services.worker.copies import Copied, Copy, Slots
from shared.pool_format import PoolUnfit
from shared.pool_map import touch

NICENESS = 10
"""The thread's own: whoever computes goes first. Beside it, copying without a pause, a decode step of the native engine
took 1.1 times as long on two cores that others kept busy; 2.1 times without it."""
PIECE_BYTES = 16 << 20
"""Of the pool, touched in one go (3 ms): a copy, or `detach`, waits no longer than that."""

_log = logging.getLogger(__name__)


class _Batch(Struct):
    number: int
    copies: Sequence[Copy]
    loads: bool
    until_s: float
    good: list[bool] = field(default_factory=list)
    """Of the copies so far."""
    made: int = 0
    begun_s: float = 0.0
    """Of the first copy that was made …"""
    ended_s: float = 0.0
    """… and of the last."""
    cancelled: bool = False
    failed: str = ""

    def add(self, good: bool, begun_s: float, ended_s: float, *, made: bool) -> None:
        """What became of the next copy."""
        self.good.append(good)
        if made:
            self.begun_s = self.begun_s if self.made else begun_s
            self.ended_s = ended_s
            self.made += 1

    def outcome(self, block_bytes: int) -> Copied:
        """It has ended."""
        missing = len(self.copies) - len(self.good)
        good = [False] * len(self.copies) if self.failed else [*self.good, *[False] * missing]
        return Copied(self.number, good, self.made * block_bytes, self.ended_s - self.begun_s, self.failed)


class HostMover:
    """A Mover; see the module. How many batches wait is bounded by who asks. Linux."""

    def __init__(self, blocks: memoryview, block_bytes: int, clock: Callable[[], float]) -> None:
        """`blocks`: all device slots, one behind the other, each of `block_bytes`; writable and contiguous."""
        self._blocks: memoryview | None = blocks  # kept alive
        self._blocks_at = _address(blocks)
        self._block_bytes = block_bytes
        self._device_slots = blocks.nbytes // block_bytes
        self._clock = clock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._slots: Slots | None = None
        self._slots_at = 0
        self._complained = False
        self._work = threading.Condition()
        """Guards all below; what is in a batch is the thread's alone, but for `cancelled`."""
        self._loads: deque[_Batch] = deque()
        self._saves: deque[_Batch] = deque()
        self._untouched = range(0)
        """Where the pieces that are yet to be touched begin."""
        self._touching = False
        self._ended: list[Copied] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def attach(self, slots: Slots) -> None:
        """Raises PoolUnfit where a block is larger than a slot."""
        assert self._slots is None
        if slots.arena.slot_bytes < self._block_bytes:
            raise PoolUnfit(f"slots of {slots.arena.slot_bytes} bytes for blocks of {self._block_bytes}")
        with self._work:
            self._slots = slots
            self._slots_at = _address(slots.bytes)
            self._untouched = range(0, slots.bytes.nbytes, PIECE_BYTES)
            self._work.notify_all()

    def detach(self) -> None:
        with self._work:
            assert len(self._loads) + len(self._saves) == 0, "copies are under way"
            self._untouched = range(0)
            while self._touching:
                self._work.wait()
            self._slots = None

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        self._add(_Batch(batch, copies, loads=False, until_s=until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._add(_Batch(batch, copies, loads=True, until_s=inf))

    def cancel(self, batch: int) -> None:
        with self._work:
            for waiting in (*self._loads, *self._saves):
                if waiting.number == batch:
                    waiting.cancelled = True

    def ended(self) -> list[Copied]:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        with self._work:
            told, self._ended = self._ended, []
        return told

    def fileno(self) -> int:
        return self._wake

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        """Waits for the copy under way, if there is one."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self._thread.join()
        os.close(self._wake)
        self._blocks = None

    def _add(self, batch: _Batch) -> None:
        assert self._slots is not None
        with self._work:
            (self._loads if batch.loads else self._saves).append(batch)
            self._work.notify_all()

    # --- the mover's thread

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # Linux: of this thread
        while True:
            with self._work:
                while not (self._closed or self._loads or self._saves or self._untouched):
                    self._work.wait()
                if self._closed:
                    return
                line = self._loads or self._saves
                piece = None if line else self._untouched[0]
                self._touching = piece is not None
            if piece is None:
                self._work_on(line[0])
            else:
                self._touch(piece)

    def _work_on(self, batch: _Batch) -> None:
        """Until the batch has ended, or a load has come that goes before it."""
        try:
            self._copy(batch)
        except Exception as wrong:  # noqa: BLE001 - a tier thread's edge: it must outlive any one batch
            batch.failed = f"{type(wrong).__name__}: {wrong}"
            if not self._complained:
                _log.exception("a batch of copies failed; of others after it only the reason will be told")
            self._complained = True
        with self._work:
            if batch.failed or batch.cancelled or len(batch.good) == len(batch.copies):
                (self._loads if batch.loads else self._saves).popleft()
                if not self._ended:  # else it is readable, or they are being taken, and this one with them
                    os.eventfd_write(self._wake, 1)
                self._ended.append(batch.outcome(self._block_bytes))

    def _copy(self, batch: _Batch) -> None:
        """See `_work_on`. The flags are read without the lock: set too late for one copy, they stop the next."""
        slots, size_bytes = self._slots, self._block_bytes
        assert slots is not None
        for copy in batch.copies[len(batch.good) :]:
            if batch.cancelled or self._closed or (self._loads and not batch.loads):
                return
            assert 0 <= copy.device_slot < self._device_slots
            if not 0 <= copy.pool_slot < slots.arena.slots:  # another process named it
                raise PoolUnfit(f"slot {copy.pool_slot} of an arena of {slots.arena.slots}")
            in_pool = self._slots_at + copy.pool_slot * slots.arena.slot_bytes
            on_device = self._blocks_at + copy.device_slot * size_bytes
            begins_s = self._clock()
            made = begins_s < batch.until_s
            good = made
            if made and batch.loads:
                ctypes.memmove(on_device, in_pool, size_bytes)
                good = slots.generation(copy.pool_slot) == copy.generation
            elif made:
                ctypes.memmove(in_pool, on_device, size_bytes)
            batch.add(good, begins_s, self._clock(), made=made)

    def _touch(self, piece: int) -> None:
        assert self._slots is not None
        with self._slots.bytes[piece : piece + PIECE_BYTES] as memory:
            try:
                touch(memory)
                failed = False
            except Exception as wrong:  # noqa: BLE001 - as in `_work_on`; copies then touch their pages themselves
                # Its text alone: who keeps the exception keeps the pool mapped.
                _log.warning("the pool's pages are not touched beforehand, copies will be slower: %s", str(wrong))
                failed = True
        with self._work:
            self._touching = False
            self._untouched = range(0) if failed else self._untouched[1:]
            self._work.notify_all()


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
