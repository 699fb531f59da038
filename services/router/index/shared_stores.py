"""Whose blocks count for whom: a block store lends what it holds to the candidates that are attached to it. Pure.

    lender k ◀── borrower a        a block that k has in host memory or on disk, a has there too
             ◀── borrower b

Lender and borrowers are named before they have a slot, and after: a slot that is given up and opened anew lends, or
borrows, at once. A lender is nobody's choice, so `find` never names it. Masks have a bit for each slot, by its number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

CandidateId = tuple[str, int]
"""(instance, data-parallel rank); of a lender (its name, 0)."""

_UNIONS_LIMIT = 1024


class Lending:
    """The open slots of lenders and borrowers."""

    def __init__(self) -> None:
        self._lender_of: dict[CandidateId, CandidateId] = {}
        self._borrowers_of: dict[CandidateId, dict[CandidateId, None]] = {}
        """The same from the other side; a lender without borrowers is none."""
        self._open: dict[CandidateId, int] = {}
        """The number of each open slot, of lenders and of all others."""
        self._lent_to: dict[int, int] = {}
        """Bit of a lender's slot → the slots that borrow from it."""
        self._unions: dict[int, int] = {}
        """Lenders' slots → all that borrow from one of them; a bounded memo."""
        self.lenders = 0
        """The slots that lend."""

    def borrow(self, candidate: CandidateId, lender: CandidateId | None) -> None:
        """`candidate` borrows from `lender` from now on, and from nobody else."""
        before = self._lender_of.pop(candidate, None)
        if before is not None:
            del self._borrowers_of[before][candidate]
            if not self._borrowers_of[before]:
                del self._borrowers_of[before]
            self._settle(before)
        if lender is not None:
            assert lender not in self._lender_of, "a borrower lends nothing"
            assert candidate not in self._borrowers_of, "a lender borrows nothing"
            self._lender_of[candidate] = lender
            self._borrowers_of.setdefault(lender, {})[candidate] = None
            self._settle(lender)

    def opened(self, candidate: CandidateId, number: int) -> None:
        """It holds blocks in this slot now."""
        self._open[candidate] = number
        self._settle(self._lender_of.get(candidate, candidate))

    def retired(self, candidate: CandidateId) -> None:
        """It holds none in its slot any more."""
        bit = 1 << self._open.pop(candidate)
        self._unions.clear()
        if self._lent_to.pop(bit, None) is not None:
            self.lenders &= ~bit
        elif candidate in self._lender_of:
            self._settle(self._lender_of[candidate])

    def widened(self, holding: int) -> int:
        """The slots in `holding`, and those that borrow from lenders among them."""
        lending = holding & self.lenders
        if not lending:
            return holding
        borrowing = self._unions.get(lending)
        return holding | (self._union(lending) if borrowing is None else borrowing)

    def _union(self, lending: int) -> int:
        if len(self._unions) >= _UNIONS_LIMIT:
            self._unions.clear()
        borrowing = 0
        for bit, borrowers in self._lent_to.items():
            if lending & bit:
                borrowing |= borrowers
        self._unions[lending] = borrowing
        return borrowing

    def _settle(self, lender: CandidateId) -> None:
        """Make the masks agree with who borrows from it."""
        number = self._open.get(lender)
        if number is None:
            return
        bit = 1 << number
        self._unions.clear()
        borrowers = self._borrowers_of.get(lender)
        if borrowers is None:
            self._lent_to.pop(bit, None)
            self.lenders &= ~bit
        else:
            self._lent_to[bit] = self._mask(borrowers)
            self.lenders |= bit

    def _mask(self, candidates: Iterable[CandidateId]) -> int:
        """The slots of those that have one."""
        return sum(1 << self._open[candidate] for candidate in candidates if candidate in self._open)

    def validate(self) -> None:
        """Assert every invariant."""
        pairs = {(borrower, lender) for lender, borrowers in self._borrowers_of.items() for borrower in borrowers}
        assert pairs == set(self._lender_of.items())
        assert all(self._borrowers_of.values())
        assert not self._lender_of.keys() & self._borrowers_of.keys()
        assert len(set(self._open.values())) == len(self._open), "two candidates in one slot"
        assert self._lent_to == {
            1 << self._open[lender]: self._mask(borrowers)
            for lender, borrowers in self._borrowers_of.items()
            if lender in self._open
        }
        assert self.lenders == sum(self._lent_to)
        assert len(self._unions) <= _UNIONS_LIMIT
        for lending, borrowing in self._unions.items():
            lent_to = [borrowers for bit, borrowers in self._lent_to.items() if bit & lending]
            assert borrowing == reduce(or_, lent_to, 0)
