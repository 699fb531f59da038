"""Copies of blocks between the pool and several ranks' devices: GroupCopier at rank 0, RankCopies at each other rank.

    rank 0: lane ─ begin ─▶ own copier, and one packet to each rank ─▶ RankCopies ─▶ the rank's copier
                 ─ wait ──▶ own copies have ended, and every rank has answered

A block is whole in a slot of the pool. Each rank copies the fragments of its key-value heads (transfer's SlotPart), so
the block is there when all ranks have answered, and not before: a rank that fails makes all copies of the group fail.
Every rank maps the slots itself, and shares the engine's lock next to the pool, so that no slot is granted to others
before the last of them is gone.

A rank is waited for until it answers or ends, however long that is: one that stands still may go on, and write. The
next step finds it lost, and ends it.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from services.worker.contracts.mover import Copy, Slots
from services.worker.contracts.runner import AttachedPool
from services.worker.native.parallel.messages import (
    AttachSlots,
    CompareBlocks,
    CopyAnswer,
    CopyBlocks,
    CopyOrder,
    DetachSlots,
    decode_answer,
    decode_copy_order,
    encode_answer,
    encode_copy_order,
)
from services.worker.native.parallel.peers import RankLost
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Copier, Pending
from services.worker.transfer.errors import DeviceFailed
from shared.errors import HeadraceError
from shared.pool.format import Arena, PoolUnfit
from shared.pool.lock import POOL, HeldLock, join_owner
from shared.pool.map import ArenaMap, PoolMap

MOST_PACKET_BYTES = 1 << 16
"""The most bytes of a packet: an order for 256 blocks, or its answer, has a tenth of them."""


class CopyEnds(Struct, frozen=True):
    """One side's ends of the three connections between rank 0's copier and that of another rank."""

    saves: socket.socket
    loads: socket.socket
    control: socket.socket

    @staticmethod
    def pair() -> tuple[CopyEnds, CopyEnds]:
        """Return both sides of new connections."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        return CopyEnds(*(one for one, _ in pairs)), CopyEnds(*(other for _, other in pairs))

    @staticmethod
    def of(numbers: Sequence[int]) -> CopyEnds:
        """Return the ends with these descriptors, which this process has inherited."""
        return CopyEnds(*(socket.socket(fileno=number) for number in numbers))

    @property
    def all(self) -> tuple[socket.socket, ...]:
        return self.saves, self.loads, self.control

    def close(self) -> None:
        for end in self.all:
            end.close()


class GroupCopier:
    """A Copier of whole blocks for all ranks. It owns rank 0's copier, but not the connections."""

    def __init__(
        self,
        own: Copier,
        block_bytes: int,
        ranks: Sequence[CopyEnds],
        place: Callable[[], AttachedPool],
        ended: Callable[[int], None],
        limit_s: float,
    ) -> None:
        """`own` copies rank 0's part of blocks of `block_bytes`; `ranks` are the connections to rank 1 and higher.
        `place` says what is attached. `ended` returns when a rank's process has ended, which is about to, and its
        device writes nothing more. A rank attaches within `limit_s`."""
        self.shape = BlockShape.contiguous(0, block_bytes, own.shape.slots)
        self.duplex, self.group_blocks = own.duplex, own.group_blocks
        self._own, self._ranks, self._place = own, ranks, place
        self._ended, self._limit_s = ended, limit_s

    def attach(self, slots: Slots) -> None:
        place, arena = self._place(), slots.arena
        numbers = (arena.offset, arena.slot_bytes, arena.slots, arena.generations)
        order = AttachSlots(place.directory, place.owner, place.file, numbers)
        failed = [answer.failed for answer in self._controlled(order) if answer.failed]
        if failed:
            self._controlled(DetachSlots())
            raise PoolUnfit(failed[0])
        self._own.attach(slots)

    def detach(self) -> None:
        self._controlled(DetachSlots())
        self._own.detach()

    def prepare(self) -> bool:
        return self._own.prepare()

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Pending:
        pending = self._own.begin(copies, loads=loads)
        ends = [rank.loads if loads else rank.saves for rank in self._ranks]
        _send(ends, CopyBlocks(_slots(copies)))
        return _GroupPending(pending, [self._answer(number, end) for number, end in enumerate(ends, 1)])

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        ends = [rank.control for rank in self._ranks]
        _send(ends, CompareBlocks(_slots(copies)))
        found = self._own.differs(copies)
        for number, end in enumerate(ends, 1):
            answer = self._answer(number, end)()
            if answer.failed:
                raise DeviceFailed(answer.failed)
            found = [one or other for one, other in zip(found, answer.differs, strict=True)]
        return found

    def close(self) -> None:
        self._own.close()

    def _controlled(self, order: CopyOrder) -> list[CopyAnswer]:
        """Have all ranks carry out an order while nothing is copied; return their answers. Raise RankLost."""
        ends = [rank.control for rank in self._ranks]
        _send(ends, order)
        answers = []
        for number, end in enumerate(ends, 1):
            end.settimeout(self._limit_s)
            try:
                answers.append(self._answer(number, end)())
            except TimeoutError:
                raise RankLost(number, f"did not answer in {self._limit_s:g} s: it stands still") from None
            finally:
                end.settimeout(None)
        return answers

    def _answer(self, number: int, end: socket.socket) -> Callable[[], CopyAnswer]:
        """Return what waits for a rank's next answer. One that has ended has failed."""

        def wait() -> CopyAnswer:
            try:
                packet = end.recv(MOST_PACKET_BYTES)
            except ConnectionError:
                packet = b""
            if packet:
                return decode_answer(packet)
            self._ended(number)
            return CopyAnswer(failed=f"rank {number} has ended")

        return wait


class _GroupPending:
    """Copies of all ranks that are under way."""

    def __init__(self, own: Pending, answers: Sequence[Callable[[], CopyAnswer]]) -> None:
        self._own, self._answers = own, answers
        self._fallbacks: Counter[str] = Counter()

    @property
    def paths(self) -> Mapping[str, int]:
        """The paths of rank 0's part; a block counts once."""
        return self._own.paths

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Blocks for which a better path failed, at each rank."""
        return self._fallbacks

    def wait(self) -> None:
        """Wait for all ranks, also if one fails: the others may still read or write the same slots."""
        failed: list[DeviceFailed] = []
        try:
            self._own.wait()
        except DeviceFailed as wrong:
            failed.append(wrong)
        self._fallbacks.update(self._own.fallbacks)
        for wait in self._answers:
            answer = wait()
            self._fallbacks.update(answer.fallbacks)
            if answer.failed:
                failed.append(DeviceFailed(answer.failed))
        if failed:
            raise failed[0]


def _send(ends: Sequence[socket.socket], order: CopyOrder) -> None:
    packet = encode_copy_order(order)
    for end in ends:
        with suppress(OSError):  # the rank has ended: there is no answer either
            end.send(packet)


def _slots(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    return [(copy.pool_slot, copy.device_slot) for copy in copies]


class RankCopies:
    """Copies a further rank's part of blocks in threads, one for each connection, until rank 0 hangs up."""

    def __init__(self, rank: int, copier: Copier, ends: CopyEnds, number: int | None, *, stores: bool) -> None:
        """`ends` are its own from now on. `number` is an open descriptor that the lock replaces, as in OwnerName.
        Without `stores` another rank, which has the same heads, saves them."""
        self._rank, self._copier, self._stores, self._number = rank, copier, stores, number
        self._ends = ends
        self._pool: PoolMap | None = None
        self._slots: ArenaMap | None = None
        self._lock: HeldLock | None = None
        served = {"saves": (ends.saves, False), "loads": (ends.loads, True)}
        self._threads = [
            threading.Thread(target=self._serve_copies, args=each, name=name, daemon=True)
            for name, each in served.items()
        ]
        self._threads.append(threading.Thread(target=self._serve_control, args=(ends.control,), daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait for the threads' end, after rank 0 has hung up, and let go of the pool."""
        for thread in self._threads:
            thread.join()
        self._ends.close()
        self._detach()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- the threads

    def _serve_copies(self, end: socket.socket, loads: bool) -> None:
        """Copy in one direction. Copies begin while those before them are under way."""
        flying: deque[Pending | CopyAnswer] = deque()
        with suppress(OSError):
            while True:
                if flying and not _has_packet(end):
                    end.send(encode_answer(self._landed(flying.popleft())))
                    continue
                packet = end.recv(MOST_PACKET_BYTES)
                if not packet:
                    return
                flying.append(self._begun(packet, loads))

    def _begun(self, packet: bytes, loads: bool) -> Pending | CopyAnswer:
        if not (loads or self._stores):
            return CopyAnswer()
        try:
            order = decode_copy_order(packet)
            assert isinstance(order, CopyBlocks)
            return self._copier.begin([Copy(*slots) for slots in order.slots], loads=loads)
        except Exception as wrong:  # noqa: BLE001 - the rank's edge: rank 0 learns of every failure
            return self._failed(wrong)

    def _landed(self, pending: Pending | CopyAnswer) -> CopyAnswer:
        if isinstance(pending, CopyAnswer):
            return pending
        try:
            pending.wait()
        except Exception as wrong:  # noqa: BLE001 - as above
            return self._failed(wrong)
        return CopyAnswer(fallbacks=dict(pending.fallbacks))

    def _serve_control(self, end: socket.socket) -> None:
        """Attach, detach and compare; meanwhile prepare the pool for later copies, piece by piece."""
        unready = False
        with suppress(OSError):
            while True:
                if unready and not _has_packet(end):
                    unready = self._prepare()
                    continue
                packet = end.recv(MOST_PACKET_BYTES)
                if not packet:
                    return
                answer = self._carried_out(packet)
                unready = self._slots is not None
                end.send(encode_answer(answer))

    def _carried_out(self, packet: bytes) -> CopyAnswer:
        try:
            match decode_copy_order(packet):
                case AttachSlots() as order:
                    self._attach(order)
                case DetachSlots():
                    self._detach()
                case CompareBlocks(slots=slots):
                    return CopyAnswer(differs=self._copier.differs([Copy(*each) for each in slots]))
                case CopyBlocks():
                    raise AssertionError("copies have connections of their own")
        except Exception as wrong:  # noqa: BLE001 - as above
            return self._failed(wrong)
        return CopyAnswer()

    def _attach(self, order: AttachSlots) -> None:
        """Share the lock first: from then on this rank may write."""
        directory = Path(order.directory)
        if self._lock is None or self._lock.path.name != order.owner or not self._lock.held:
            lock, before = join_owner(directory, order.owner), self._lock
            if self._number is not None:
                lock.move_to(self._number)
            self._lock = lock
            if before is not None:
                before.close()
        self._pool = PoolMap(directory / POOL)
        if (self._pool.about.st_dev, self._pool.about.st_ino) != order.file:
            raise PoolUnfit(f"{directory}: another pool has taken the place of the engine's")
        self._slots = self._pool.arena(Arena(*order.arena))
        self._copier.attach(self._slots)

    def _detach(self) -> None:
        self._copier.detach()
        slots, pool, self._slots, self._pool = self._slots, self._pool, None, None
        if slots is not None:
            slots.close()
        if pool is not None:
            pool.close()

    def _prepare(self) -> bool:
        """Pin one more piece of the pool; return whether there is more."""
        try:
            return self._copier.prepare()
        except Exception:  # noqa: BLE001 - copies then touch their pages themselves
            return False

    def _failed(self, wrong: Exception) -> CopyAnswer:
        said = str(wrong) if isinstance(wrong, HeadraceError) else f"{type(wrong).__name__}: {wrong}"
        return CopyAnswer(failed=f"rank {self._rank}: {said[:1024]}")


def _has_packet(end: socket.socket) -> bool:
    return bool(select.select([end], [], [], 0)[0])
