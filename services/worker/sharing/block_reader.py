"""BlockReader: a decode worker's end of all shares: one connection, one mapping and one thread of copies a sharer.

ask ──▶ the sharer's socket is found ──▶ its memory is mapped ──▶ read ──▶ SlotsShared … ──▶ load ──▶ release
               │ none listens, it refuses, its memory cannot be mapped, it ends
               └──▶ the answer says that no block is shared; the engine goes another way
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import SharedSlots
from services.worker.sharing import packets
from services.worker.sharing.memory import SharableMemory
from services.worker.sharing.messages import MOST_BLOCKS, SharingIdentity, SlotsShared
from services.worker.sharing.page_reader import PageReader
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.mover import TransferMover
from shared.errors import Unavailable
from shared.hashing import ContentKey
from shared.pool.format import Arena
from shared.rate_limited_log import RateLimitedLog

MOST_SHARERS = 8
"""The most engines whose memory is mapped at once. For a further one, another that shares nothing now is left."""
SILENT_S = 15.0
"""Seconds without an answer after which nothing more is awaited of a share: longer than its sharer lets it wait, so
that the sharer is frozen."""
REFUSED_S = 10.0
"""Seconds for which a sharer is not asked again after its memory could not be mapped, or nothing could copy it."""
MOST_REFUSED = 64
"""The most such sharers that are remembered."""
_SHARED = 0
"""The generation of all slots of a sharer while its connection is open: that of copies that name none."""


class _SharedMemorySlots:
    """The sharer's slots as a mover needs them; the copier knows where they are mapped."""

    bytes = memoryview(b"")

    def __init__(self, reader: PageReader, block_bytes: int, slots: int) -> None:
        self.arena = Arena(0, block_bytes, slots, 0)
        self._reader = reader

    def generation(self, slot: int) -> int:  # noqa: ARG002 - all slots have the same one
        """Return the same generation as long as the sharer keeps all shared slots as they are."""
        return _SHARED if self._reader.connected else _SHARED - 1


class _Link(Struct, eq=False):
    """The connection to one sharer."""

    reader: PageReader
    mover: TransferMover | None = None
    """None if the sharer's memory is not mapped."""
    queued: list[tuple[int, Sequence[ContentKey]]] = field(default_factory=list)
    """Shares to ask for once it is."""
    shares: dict[int, float] = field(default_factory=dict)
    """Number of each share that is not released → when its sharer has been silent too long. 0 if no further answer is
    awaited."""
    batches: dict[int, int] = field(default_factory=dict)
    """Batch of copies under way → its share."""
    failed: str = ""
    """Why it is not used any longer."""


class BlockReader:
    """A ShareReader of one engine, from sharers in the directory of its kvbm's pool."""

    def __init__(
        self,
        directory: Path,
        memory: Callable[[], SharableMemory],
        identity: SharingIdentity,
        clock: Callable[[], float],
    ) -> None:
        """`memory` returns the engine's present memory; what it returned before is not used after `leave`."""
        self._directory = directory
        self._memory = memory
        self._identity = identity
        self._clock = clock
        self._links: dict[str, _Link] = {}
        """Worker → the link to its engine, the one that was used last at the end."""
        self._answers: list[SharedSlots] = []
        self._lost: list[Copied] = []
        """Batches that were asked for after their sharer had ended."""
        self._gone: set[str] = set()
        """The workers that `gone_sharers` returns next."""
        self._refused: dict[str, float] = {}
        """Sharer whose memory could not be read → when it is asked again, the newest at the end."""
        self._limited_log = RateLimitedLog(clock=clock)
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while `_answers` or `_lost` has anything that came without a sharer's word: an engine that has
        nothing else to do sleeps."""
        self._poller.register(self._wake, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `turn` or `ended` has something to do."""
        return self._poller.fileno()

    def ask(self, number: int, owner: str, worker: str, keys: Sequence[ContentKey]) -> None:
        link = self._links.pop(worker, None) or self._connect(worker, owner)
        if link is None:
            self._answers.append(SharedSlots(number, [], last=True))
            os.eventfd_write(self._wake, 1)
            return
        self._links[worker] = link
        link.shares[number] = self._clock() + SILENT_S
        if link.mover is None:
            link.queued.append((number, keys[:MOST_BLOCKS]))
        else:
            link.reader.read(number, keys[:MOST_BLOCKS])

    def turn(self) -> list[SharedSlots]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        now_s = self._clock()
        for worker, link in list(self._links.items()):
            for answer in link.reader.turn():
                slots = answer.slots if isinstance(answer, SlotsShared) else []
                self._answer(link, answer.number, slots, last=not isinstance(answer, SlotsShared) or answer.last)
            if link.reader.theirs is not None and link.mover is None and not (link.reader.ended or link.failed):
                self._open(link)
            over = bool(link.reader.ended or link.reader.closing or link.failed)
            for number in [number for number, until_s in link.shares.items() if until_s and (over or until_s <= now_s)]:
                self._answer(link, number, [], last=True)
            if over and not link.batches and (link.reader.ended or not link.shares):
                self._leave(worker)
        answers, self._answers = self._answers, []
        return answers

    def load(self, batch: int, number: int, copies: Sequence[Copy]) -> None:
        link = next((link for link in self._links.values() if number in link.shares), None)
        if link is None:
            self._lost.append(Copied(batch, [False] * len(copies), 0, 0.0))
            os.eventfd_write(self._wake, 1)
            return
        assert link.mover is not None
        link.batches[batch] = number
        link.mover.load(batch, copies)

    def cancel(self, batch: int) -> None:
        for link in self._links.values():
            if batch in link.batches and link.mover is not None:
                link.mover.cancel(batch)

    def ended(self) -> list[Copied]:
        ended, self._lost = self._lost, []
        for link in self._links.values():
            for copied in [] if link.mover is None else link.mover.ended():
                del link.batches[copied.batch]
                link.failed = link.failed or copied.failed
                ended.append(replace(copied, failed=""))
        return ended

    def gone_sharers(self) -> list[str]:
        gone, self._gone = self._gone, set()
        return list(gone)

    def release(self, number: int) -> None:
        for link in self._links.values():
            if link.shares.pop(number, None) is not None:
                link.queued = [asked for asked in link.queued if asked[0] != number]
                link.reader.release(number)

    @property
    def wait_until_s(self) -> float | None:
        silent_s = [until_s for link in self._links.values() for until_s in link.shares.values() if until_s]
        return min(silent_s, default=None)

    def leave(self) -> None:
        for worker in list(self._links):
            self._leave(worker)

    def close(self) -> None:
        self.leave()
        self._poller.close()
        os.close(self._wake)

    # --- links

    def _connect(self, worker: str, owner: str) -> _Link | None:
        """Return a link to the worker's engine whose memory is not mapped yet; None if it cannot be had."""
        if len(self._links) == MOST_SHARERS and not self._make_room():
            return None
        memory, now_s, why = self._memory(), self._clock(), ""
        for sharer in packets.sharers_of(self._directory, worker):
            if self._refused.get(sharer, now_s) > now_s:
                continue
            try:
                reader = PageReader(self._directory, sharer, owner, self._identity, memory.shape, memory.mapper)
            except Unavailable as wrong:
                why = str(wrong)
                continue
            self._poller.register(reader.fileno(), select.EPOLLIN)
            return _Link(reader)
        if why:  # without a socket it shares nothing, or is on another machine
            self._limited_log.warn("blocks come through the kvbm only", why)
        return None

    def _make_room(self) -> bool:
        idle = next((worker for worker, link in self._links.items() if not link.shares and not link.batches), None)
        if idle is not None:
            self._leave(idle)
        return idle is not None

    def _open(self, link: _Link) -> None:
        """The sharer's memory is mapped: ask for what waits."""
        theirs, memory = link.reader.theirs, self._memory()
        assert theirs is not None
        try:
            with ExitStack() as opened:
                copier = memory.copier(theirs)
                opened.callback(copier.close)
                link.mover = TransferMover(copier, self._clock)
                opened.pop_all()
        except (DeviceFailed, OSError) as wrong:  # no room on a full GPU for a stream or a kernel; no descriptor left
            link.failed = str(wrong)
            self._limited_log.warn("blocks come through the kvbm only", f"{link.reader.sharer}: {wrong}")
            return
        link.mover.attach(_SharedMemorySlots(link.reader, theirs.block_bytes, theirs.slots))
        self._poller.register(link.mover.fileno(), select.EPOLLIN)
        for number, keys in link.queued:
            link.reader.read(number, keys)
        link.queued.clear()

    def _answer(self, link: _Link, number: int, slots: list[int], *, last: bool) -> None:
        link.shares[number] = 0.0 if last else self._clock() + SILENT_S
        self._answers.append(SharedSlots(number, slots, last))

    def _leave(self, worker: str) -> None:
        link = self._links.pop(worker)
        if link.mover is None and (link.reader.ended or link.failed):
            self._refused.pop(link.reader.sharer, None)
            self._refused[link.reader.sharer] = self._clock() + REFUSED_S
            if len(self._refused) > MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
        self._poller.unregister(link.reader.fileno())
        if link.mover is not None:
            self._gone.add(worker)
            self._poller.unregister(link.mover.fileno())
            link.mover.close()
        link.reader.leave()
