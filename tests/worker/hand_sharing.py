"""Loans between engines of one process, over the real Lending: they go on when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import Borrowed
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.sharing.shares import Lending, LendingLimits, LendingRefused
from shared.hashing import ContentKey

LIMITS = LendingLimits(readers=3, loans=3, blocks=8)
_connections = count(1)


class HandLender:
    """A Lender of one engine. `memory` is a row of bytes for each of its slots."""

    def __init__(self, blocks: KVCacheManager, memory: Any) -> None:
        self.lending = Lending(LIMITS)
        self.memory = memory
        self.gone = self.failing = False
        self.failures = 0
        self._blocks = blocks
        self._readers: dict[int, HandBorrower] = {}

    def admit(self, reader: HandBorrower) -> int:
        """Return the connection of a reader. Raise LendingRefused."""
        connection = next(_connections)
        self._blocks.take_back(self.lending.admit(connection, reader.name))
        self._readers[connection] = reader
        return connection

    def turn(self, _owner: str, now_s: float) -> None:
        for reader in list(self._readers.values()):
            if reader.gone:
                self._blocks.take_back(self.lending.proven_dead(reader.name))
        self._readers = {number: reader for number, reader in self._readers.items() if not reader.gone}
        for connection, number, loan in self.lending.waiting():
            slots = self._blocks.lend(loan.keys[len(loan.slots) :])
            if self.lending.add(loan, slots, now_s):
                self._readers[connection].inbox.append(Borrowed(number, slots, last=not loan.waits))
        self.lending.validate()

    def is_borrowed(self, key: ContentKey) -> bool:
        return self.lending.is_borrowed(key)

    @property
    def wait_until_s(self) -> float | None:
        return None

    def take_back(self, connection: int, number: int | None) -> None:
        """A reader releases a loan; None: it leaves."""
        if connection in self._readers:
            release = self.lending.leave(connection) if number is None else self.lending.release(connection, number)
            self._blocks.take_back(release)
            if number is None:
                del self._readers[connection]

    def connected(self, connection: int) -> bool:
        return connection in self._readers

    def close(self) -> None:
        self._blocks.take_back(self.lending.end_all())
        self._readers.clear()


class _Loan(Struct, eq=False):
    lender: HandLender
    connection: int
    expected: bool = True


class _Batch(Struct, eq=False):
    number: int
    loan: _Loan
    copies: Sequence[Copy]
    good: list[bool] = []
    half: bool = False
    cancelled: bool = False


class HandBorrower:
    """A Borrower of one engine, from the lenders that `lenders` returns by worker. It copies half a block at once."""

    def __init__(
        self,
        name: str,
        memory: Any,
        lenders: Callable[[str], HandLender | None],
        clock: Callable[[], float],
    ) -> None:
        """`memory` is a row of bytes for each of the engine's slots."""
        self.name = name
        self.inbox: deque[Borrowed] = deque()
        self.gone = False
        self.wait_until_s: float | None = None
        self.copied_blocks = 0
        self._memory = memory
        self._lenders = lenders
        self._clock = clock
        self._connections: dict[str, tuple[HandLender, int]] = {}
        """Worker → its lender and the connection to it."""
        self._loans: dict[int, _Loan] = {}
        self._batches: list[_Batch] = []
        self._ended: list[Copied] = []

    def ask(self, number: int, _owner: str, worker: str, keys: Sequence[ContentKey]) -> None:
        lender = self._lenders(worker)
        try:
            if lender is None:
                raise LendingRefused("closing", "there is no such lender")
            known = self._connections.get(worker)
            connection = known[1] if known is not None and lender.connected(known[1]) else lender.admit(self)
            self._connections[worker] = lender, connection
            lender.lending.open_loan(connection, number, list(keys), self._clock())
        except LendingRefused:
            self.inbox.append(Borrowed(number, [], last=True))
        else:
            self._loans[number] = _Loan(lender, connection)

    def turn(self) -> list[Borrowed]:
        answers = [answer for answer in self.inbox if answer.number in self._loans or answer.last]
        self.inbox.clear()
        for answer in answers:
            if answer.number in self._loans:
                self._loans[answer.number].expected = not answer.last
        for number, loan in self._loans.items():
            if loan.expected and not loan.lender.connected(loan.connection):
                loan.expected = False
                answers.append(Borrowed(number, [], last=True))
        return answers

    def load(self, batch: int, number: int, copies: Sequence[Copy]) -> None:
        self._batches.append(_Batch(batch, self._loans[number], copies, []))

    def cancel(self, batch: int) -> None:
        for waiting in self._batches:
            waiting.cancelled |= waiting.number == batch

    def ended(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended

    def gone_lenders(self) -> list[str]:
        gone: list[str] = []
        for name, (lender, connection) in list(self._connections.items()):
            if not lender.connected(connection) and not any(batch.loan.lender is lender for batch in self._batches):
                del self._connections[name]
                gone.append(name)
        return gone

    def release(self, number: int) -> None:
        loan = self._loans.pop(number, None)
        if loan is not None:
            loan.lender.take_back(loan.connection, number)

    def leave(self) -> None:
        assert not self._batches, "a copy is under way"
        for lender, connection in self._connections.values():
            lender.take_back(connection, None)
        self._connections.clear()
        self._loans.clear()

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
            self._memory[copy.device_slot][part] = batch.loan.lender.memory[copy.pool_slot][part]
            if batch.half:
                batch.good.append(True)
            batch.half = not batch.half
        if len(batch.good) == len(batch.copies):
            self._batches.remove(batch)
            connected = batch.loan.lender.connected(batch.loan.connection)
            good = [one and connected for one in batch.good]
            self.copied_blocks += sum(good)
            self._ended.append(Copied(batch.number, good, 0, 0.001))
