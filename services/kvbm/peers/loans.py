"""Loans: which blocks other machines' kvbms may read now, and when their slots are free again. Pure.

    open ──▶ lent ──take──▶ sending ──arrived──▶ lent     a loan may be sent on several connections at once
              │               │
              │ return        │ return ──▶ ending ──all that is sent has arrived──▶ released
              ▼               │              │ deadline
           released           ▼              ▼
              ▲            its connection closed, deadline: ending, and the connections that send it
              └──────────────────────────── are cut ──the last of them is closed──▶ released

A slot of a loan is held until `released` is returned. The kernel may read a slot until its bytes have arrived, so no
timer ends that alone: the connection is cut, which drops what the kernel has queued, and the loan waits until that is
done. Bytes have arrived when the reader says something else on the connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from services.kvbm.peers.messages import PeerRefusalCode
from shared.errors import HeadraceError


class LoanRefused(HeadraceError):
    """The lender does not do what was asked."""

    def __init__(self, code: PeerRefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code: PeerRefusalCode = code


class LoanLimits(Struct, frozen=True):
    """How much may be lent at once."""

    loans: int
    size_bytes: int


class LoanEnds(Struct, frozen=True):
    """What the shell must do: cut connections, and release the slots of loans."""

    cut: list[int]
    """Connections that send a loan that has ended."""
    released: list[int]
    """Loans whose slots nothing reads any more."""


class Loan(Struct):
    """Blocks that one reader may take."""

    connection: int
    """The connection on which it was opened, and with which it ends."""
    slots: list[int]
    size_bytes: int
    deadline_s: float
    sending: set[int]
    """Connections on which some of it is on its way."""
    ending: bool = False
    cut: bool = False
    """Whether these connections are being cut."""


class Loans:
    """All loans of one kvbm. Ids begin with `first_loan`, which is drawn, so that no loan of another epoch is meant."""

    def __init__(self, limits: LoanLimits, *, first_loan: int = 1) -> None:
        self.limits = limits
        self._next = first_loan
        self._loans: dict[int, Loan] = {}
        self._sending: dict[int, int] = {}
        """Connection → the loan that it sends."""
        self.size_bytes = 0
        """The bytes of all loans."""

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def room_bytes(self) -> int:
        """How many bytes may be lent in addition; 0 if there are as many loans as may be."""
        return 0 if len(self._loans) >= self.limits.loans else self.limits.size_bytes - self.size_bytes

    @property
    def sending(self) -> list[int]:
        """The connections on which some of a loan is on its way."""
        return list(self._sending)

    def open(self, connection: int, slots: Sequence[int], block_bytes: int, deadline_s: float) -> int:
        """Open a loan of slots that are held, within `room_bytes`; return its id."""
        size_bytes = len(slots) * block_bytes
        assert size_bytes <= self.room_bytes, "more is lent than there is room for"
        loan = self._next
        self._next += 1
        self._loans[loan] = Loan(connection, list(slots), size_bytes, deadline_s, set())
        self.size_bytes += size_bytes
        return loan

    def take(self, connection: int, loan: int, indices: Sequence[int]) -> list[int]:
        """Begin to send these blocks of a loan on a connection. Return their slots. Raise LoanRefused."""
        assert connection not in self._sending, "a connection sends one take at a time"
        lent = self._loans.get(loan)
        if lent is None or lent.ending:
            raise LoanRefused("unknown_loan", f"there is no loan {loan}")
        if not indices or len(set(indices)) != len(indices) or not 0 <= min(indices) <= max(indices) < len(lent.slots):
            raise LoanRefused("bad_request", f"the loan has blocks 0 to {len(lent.slots) - 1}, each asked for once")
        lent.sending.add(connection)
        self._sending[connection] = loan
        return [lent.slots[index] for index in indices]

    def arrived(self, connection: int) -> LoanEnds:
        """Record that all has arrived that was sent on the connection, or never will: the connection is closed."""
        loan = self._sending.pop(connection, None)
        if loan is None:
            return LoanEnds([], [])
        self._loans[loan].sending.discard(connection)
        return self._end([loan] if self._loans[loan].ending else [], cut=False)

    def is_busy(self, connection: int) -> bool:
        """Return whether a loan ends early with this connection: one that it opened, or sends."""
        opened = any(lent.connection == connection for lent in self._loans.values())
        return opened or connection in self._sending

    def give_back(self, connection: int, loan: int) -> LoanEnds:
        """End a loan that was opened on this connection; any other is ignored."""
        lent = self._loans.get(loan)
        return self._end([loan] if lent is not None and lent.connection == connection else [], cut=False)

    def connection_closed(self, connection: int) -> LoanEnds:
        """End a closed connection: what it sent, and the loans that were opened on it."""
        before = self.arrived(connection)
        opened = [loan for loan, lent in self._loans.items() if lent.connection == connection]
        after = self._end(opened)
        return LoanEnds(before.cut + after.cut, before.released + after.released)

    def expire(self, now_s: float) -> LoanEnds:
        """End the loans whose deadline has come."""
        return self._end([loan for loan, lent in self._loans.items() if lent.deadline_s <= now_s])

    def _end(self, loans: Iterable[int], *, cut: bool = True) -> LoanEnds:
        to_cut: list[int] = []
        released: list[int] = []
        for loan in loans:
            lent = self._loans[loan]
            if lent.sending:
                if cut and not lent.cut:
                    to_cut += sorted(lent.sending)
                    lent.cut = True
                lent.ending = True
                continue
            del self._loans[loan]
            self.size_bytes -= lent.size_bytes
            released.append(loan)
        return LoanEnds(to_cut, released)

    def validate(self) -> None:
        """Raise AssertionError if the loans contradict themselves."""
        assert self.size_bytes == sum(lent.size_bytes for lent in self._loans.values()), "bytes are counted wrong"
        assert self.size_bytes <= self.limits.size_bytes, "too much is lent"
        assert len(self._loans) <= self.limits.loans, "too many loans"
        sending = {connection: loan for loan, lent in self._loans.items() for connection in lent.sending}
        assert sending == self._sending, "a connection sends another loan than the loan knows of"
        assert sum(len(lent.sending) for lent in self._loans.values()) == len(sending), "a connection sends two loans"
        for loan, lent in self._loans.items():
            assert lent.slots, f"loan {loan} has nothing"
            assert lent.sending or not lent.ending, f"loan {loan} has ended and nothing sends it"
            assert lent.ending or not lent.cut, f"loan {loan} is cut and has not ended"
            assert loan < self._next, "a loan of the future"
