"""Lending: which blocks of this process others may be reading, and when their slots may be used again. Pure.

    reader   admit ──▶ connected ──connection_closed──▶ silent ──proven_dead──▶ gone
                         │   ▲                            │
                         │   └───────── admit again ──────┘     what it had before has ended
                         └──leave──▶ gone

    loan     lend ──▶ lent ──release, or its reader is gone or admitted again──▶ returned: its slots may change

No clock ends a loan. A reader that is stopped may go on and read; its GPU may be reading at this moment. So a slot is
returned when the reader says that it has ended, or when the kernel's lock proves that the reader is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from services.worker.transfer.peer.messages import RefusalCode
from shared.errors import HeadraceError


class LendingRefused(HeadraceError):
    """The lender does not do what was asked."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code: RefusalCode = code


class LendingLimits(Struct, frozen=True):
    """How much may be lent at once."""

    readers: int = 16
    loans: int = 8
    """Loans of each reader."""
    blocks: int = 4096
    """Blocks of all loans; one that is lent twice counts twice."""


class Reader(Struct):
    """A process that has mapped this process's memory."""

    connection: int | None
    """None: its connection is closed, and it may still read."""
    loans: dict[int, list[int]] = field(default_factory=dict)
    """The slots of each loan, by its number."""


class Lending:
    """All readers of one exported memory, by the names of their kernel locks."""

    def __init__(self, limits: LendingLimits) -> None:
        self.limits = limits
        self.closing = False
        self._readers: dict[str, Reader] = {}
        self._owners: dict[int, str] = {}
        """Connection → its reader."""
        self.blocks = 0
        """The blocks of all loans."""

    @property
    def readers(self) -> list[str]:
        """The names of all readers that are not gone."""
        return list(self._readers)

    @property
    def may_free(self) -> bool:
        """Whether no other process has mapped the memory or ever will."""
        return self.closing and not self._readers

    def admit(self, connection: int, owner: str) -> list[int]:
        """Admit a reader. Return the slots of loans that it had before. Raise LendingRefused."""
        assert connection not in self._owners
        if self.closing:
            raise LendingRefused("closing", "the lender lends nothing more")
        before = self._readers.get(owner)
        if before is None and len(self._readers) >= self.limits.readers:
            raise LendingRefused("limit", f"there are {len(self._readers)} readers already")
        slots = self._end(owner)
        self._readers[owner] = Reader(connection)
        self._owners[connection] = owner
        return slots

    def check_loan(self, connection: int, number: int, blocks: int) -> None:
        """Raise LendingRefused where a loan of `blocks` blocks would be too much, before anything is held for it."""
        loans = self._readers[self._owners[connection]].loans
        if self.closing:
            raise LendingRefused("closing", "the lender lends nothing more")
        if number in loans:
            raise LendingRefused("limit", f"loan {number} has not ended")
        if len(loans) >= self.limits.loans:
            raise LendingRefused("limit", f"the reader has {len(loans)} loans already")
        if self.blocks + blocks > self.limits.blocks:
            raise LendingRefused("limit", f"{self.blocks} blocks of at most {self.limits.blocks} are lent already")

    def lend(self, connection: int, number: int, slots: Sequence[int]) -> None:
        """Record a loan that `check_loan` has allowed. Its slots stay as they are until a method returns them."""
        self.check_loan(connection, number, len(slots))
        self._readers[self._owners[connection]].loans[number] = list(slots)
        self.blocks += len(slots)

    def release(self, connection: int, number: int) -> list[int]:
        """End a loan of this connection's reader; return its slots. An unknown one has none."""
        slots = self._readers[self._owners[connection]].loans.pop(number, [])
        self.blocks -= len(slots)
        return slots

    def leave(self, connection: int) -> list[int]:
        """End a reader that has nothing mapped any more; return the slots of all its loans."""
        return self._end(self._owners[connection])

    def connection_closed(self, connection: int) -> None:
        """Record that a reader says nothing any more. Its loans go on: that proves nothing about what it reads."""
        owner = self._owners.pop(connection, None)
        if owner is not None:
            self._readers[owner].connection = None

    def proven_dead(self, owner: str) -> list[int]:
        """End a reader whose kernel lock is free; return the slots of all its loans."""
        return self._end(owner)

    def close(self) -> list[int]:
        """Lend nothing more. Return the connections of readers, which are to leave."""
        self.closing = True
        return list(self._owners)

    def _end(self, owner: str) -> list[int]:
        reader = self._readers.pop(owner, None)
        if reader is None:
            return []
        if reader.connection is not None:
            del self._owners[reader.connection]
        slots = [slot for loan in reader.loans.values() for slot in loan]
        self.blocks -= len(slots)
        return slots

    def validate(self) -> None:
        """Raise AssertionError where the loans contradict themselves."""
        loans = [loan for reader in self._readers.values() for loan in reader.loans.values()]
        assert self.blocks == sum(map(len, loans)) <= self.limits.blocks
        assert len(self._readers) <= self.limits.readers
        assert all(len(reader.loans) <= self.limits.loans for reader in self._readers.values())
        connected = {name: reader.connection for name, reader in self._readers.items() if reader.connection is not None}
        assert {owner: connection for connection, owner in self._owners.items()} == connected
