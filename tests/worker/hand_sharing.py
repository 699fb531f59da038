"""Shares between engines of one process, over the real Sharing: they go on when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import SharedSlots
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.sharing.shares import Shares, SharingLimits, SharingRefused
from shared.hashing import ContentKey

LIMITS = SharingLimits(readers=3, shares=3, blocks=8)
_connections = count(1)


class HandLender:
    """A Sharer of one engine. `memory` is a row of bytes for each of its slots."""

    def __init__(self, blocks: KVCacheManager, memory: Any) -> None:
        self.sharing = Shares(LIMITS)
        self.memory = memory
        self.gone = self.failing = False
        self.failures = 0
        self._blocks = blocks
        self._readers: dict[int, HandBorrower] = {}

    def admit(self, reader: HandBorrower) -> int:
        """Return the connection of a reader. Raise SharingRefused."""
        connection = next(_connections)
        self._blocks.take_back(self.sharing.admit(connection, reader.name))
        self._readers[connection] = reader
        return connection

    def turn(self, _owner: str, now_s: float) -> None:
        for reader in list(self._readers.values()):
            if reader.gone:
                self._blocks.take_back(self.sharing.proven_dead(reader.name))
        self._readers = {number: reader for number, reader in self._readers.items() if not reader.gone}
        for connection, number, share in self.sharing.waiting():
            slots = self._blocks.share(share.keys[len(share.slots) :])
            if self.sharing.add(share, slots, now_s):
                self._readers[connection].inbox.append(SharedSlots(number, slots, last=not share.waits))
        self.sharing.validate()

    def is_shared(self, key: ContentKey) -> bool:
        return self.sharing.is_shared(key)

    @property
    def wait_until_s(self) -> float | None:
        return None

    def take_back(self, connection: int, number: int | None) -> None:
        """A reader releases a share. None if it leaves."""
        if connection in self._readers:
            release = self.sharing.leave(connection) if number is None else self.sharing.release(connection, number)
            self._blocks.take_back(release)
            if number is None:
                del self._readers[connection]

    def connected(self, connection: int) -> bool:
        return connection in self._readers

    def close(self) -> None:
        self._blocks.take_back(self.sharing.end_all())
        self._readers.clear()


class _Share(Struct, eq=False):
    sharer: HandLender
    connection: int
    expected: bool = True


class _Batch(Struct, eq=False):
    number: int
    share: _Share
    copies: Sequence[Copy]
    good: list[bool] = []
    half: bool = False
    cancelled: bool = False


class HandBorrower:
    """A ShareReader of one engine, from the sharers that `sharers` returns by worker. It copies half a block at
    once."""

    def __init__(
        self,
        name: str,
        memory: Any,
        sharers: Callable[[str], HandLender | None],
        clock: Callable[[], float],
    ) -> None:
        """`memory` is a row of bytes for each of the engine's slots."""
        self.name = name
        self.inbox: deque[SharedSlots] = deque()
        self.gone = False
        self.wait_until_s: float | None = None
        self.copied_blocks = 0
        self._memory = memory
        self._sharers = sharers
        self._clock = clock
        self._connections: dict[str, tuple[HandLender, int]] = {}
        """Worker → its sharer and the connection to it."""
        self._shares: dict[int, _Share] = {}
        self._batches: list[_Batch] = []
        self._ended: list[Copied] = []

    def ask(self, number: int, _owner: str, worker: str, keys: Sequence[ContentKey]) -> None:
        sharer = self._sharers(worker)
        try:
            if sharer is None:
                raise SharingRefused("closing", "there is no such sharer")
            known = self._connections.get(worker)
            connection = known[1] if known is not None and sharer.connected(known[1]) else sharer.admit(self)
            self._connections[worker] = sharer, connection
            sharer.sharing.open_share(connection, number, list(keys), self._clock())
        except SharingRefused:
            self.inbox.append(SharedSlots(number, [], last=True))
        else:
            self._shares[number] = _Share(sharer, connection)

    def turn(self) -> list[SharedSlots]:
        answers = [answer for answer in self.inbox if answer.number in self._shares or answer.last]
        self.inbox.clear()
        for answer in answers:
            if answer.number in self._shares:
                self._shares[answer.number].expected = not answer.last
        for number, share in self._shares.items():
            if share.expected and not share.sharer.connected(share.connection):
                share.expected = False
                answers.append(SharedSlots(number, [], last=True))
        return answers

    def load(self, batch: int, number: int, copies: Sequence[Copy]) -> None:
        self._batches.append(_Batch(batch, self._shares[number], copies, []))

    def cancel(self, batch: int) -> None:
        for waiting in self._batches:
            waiting.cancelled |= waiting.number == batch

    def ended(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended

    def gone_sharers(self) -> list[str]:
        gone: list[str] = []
        for name, (sharer, connection) in list(self._connections.items()):
            if not sharer.connected(connection) and not any(batch.share.sharer is sharer for batch in self._batches):
                del self._connections[name]
                gone.append(name)
        return gone

    def release(self, number: int) -> None:
        share = self._shares.pop(number, None)
        if share is not None:
            share.sharer.take_back(share.connection, number)

    def leave(self) -> None:
        assert not self._batches, "a copy is under way"
        for sharer, connection in self._connections.values():
            sharer.take_back(connection, None)
        self._connections.clear()
        self._shares.clear()

    def close(self) -> None:
        self.gone = True
        self._batches.clear()

    @property
    def idle(self) -> bool:
        return not self._batches

    def go_on(self, pick: int) -> None:
        """Copy half a block of one of the batches."""
        if not self._batches:
            return
        batch = self._batches[pick % len(self._batches)]
        if not batch.half and batch.cancelled:
            batch.good += [False] * (len(batch.copies) - len(batch.good))
        if len(batch.good) < len(batch.copies):
            copy, size = batch.copies[len(batch.good)], self._memory.shape[1] // 2
            part = slice(size, 2 * size) if batch.half else slice(0, size)
            self._memory[copy.device_slot][part] = batch.share.sharer.memory[copy.pool_slot][part]
            if batch.half:
                batch.good.append(True)
            batch.half = not batch.half
        if len(batch.good) == len(batch.copies):
            self._batches.remove(batch)
            connected = batch.share.sharer.connected(batch.share.connection)
            good = [one and connected for one in batch.good]
            self.copied_blocks += sum(good)
            self._ended.append(Copied(batch.number, good, 0, 0.001))
