"""Which block stores lend to which candidates, and the ids of stores. Pure.

    lender k ◀── borrower a        a block that k has in host memory or on disk counts for a too
             ◀── borrower b

A *store* is one layout of one kvbm, named KVBM/LAYOUT: all blocks that an attached worker can fetch there. KV events
are sent per store.

Lenders and borrowers are named whether or not they have a slot. So when a slot is retired and another one is opened,
the new one lends or borrows at once. A lender cannot be chosen, so `find` never returns it. Masks have one bit per
slot, at its number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from shared.messages.cards import ModelCard

CandidateId = tuple[str, int]
"""(instance, data-parallel rank); for a lender (its name, 0)."""

StoreId = str
"""A name of the form KVBM/LAYOUT; ids contain no slash."""

_UNIONS_LIMIT = 1024


def store_id(kvbm: str, layout: str) -> StoreId:
    """Return the name of the store."""
    return f"{kvbm}/{layout}"


def store_id_of(card: ModelCard) -> StoreId | None:
    """Return the store that the card's instance is attached to, if there is one."""
    return store_id(card.kvbm, card.kvbm_layout) if card.kvbm and card.kvbm_layout else None


def kvbm_of(name: StoreId) -> str:
    """Return the kvbm's instance id."""
    return name.partition("/")[0]


def layout_of(name: StoreId) -> str:
    """Return the digest of the layout."""
    return name.partition("/")[2]


class SharedStores:
    """The open slots of lenders and borrowers."""

    def __init__(self) -> None:
        self._lender_of: dict[CandidateId, CandidateId] = {}
        self._borrowers_of: dict[CandidateId, dict[CandidateId, None]] = {}
        """The reverse of `_lender_of`; a lender without borrowers has no entry."""
        self._open: dict[CandidateId, int] = {}
        """Candidate → number of its open slot; lenders and all other candidates."""
        self._borrower_masks: dict[int, int] = {}
        """Bit of a lender's slot → mask of the slots that borrow from it."""
        self._unions: dict[int, int] = {}
        """Mask of lenders' slots → mask of all slots that borrow from at least one of them; a bounded memo."""
        self.lenders = 0
        """Mask of the slots that lend."""

    def set_lender(self, candidate: CandidateId, lender: CandidateId | None) -> None:
        """From now on, `candidate` borrows from `lender` and from no other store."""
        before = self._lender_of.pop(candidate, None)
        if before is not None:
            del self._borrowers_of[before][candidate]
            if not self._borrowers_of[before]:
                del self._borrowers_of[before]
            self._rebuild_mask(before)
        if lender is not None:
            assert lender not in self._lender_of, "a borrower lends nothing"
            assert candidate not in self._borrowers_of, "a lender borrows nothing"
            self._lender_of[candidate] = lender
            self._borrowers_of.setdefault(lender, {})[candidate] = None
            self._rebuild_mask(lender)

    def slot_opened(self, candidate: CandidateId, number: int) -> None:
        """Record the slot that the candidate holds blocks in from now on."""
        self._open[candidate] = number
        self._rebuild_mask(self._lender_of.get(candidate, candidate))

    def slot_retired(self, candidate: CandidateId) -> None:
        """Record that the candidate has no slot."""
        bit = 1 << self._open.pop(candidate)
        self._unions.clear()
        if self._borrower_masks.pop(bit, None) is not None:
            self.lenders &= ~bit
        elif candidate in self._lender_of:
            self._rebuild_mask(self._lender_of[candidate])

    def with_borrowers(self, holding: int) -> int:
        """Return the slots in `holding`, and those that borrow from lenders among them."""
        lending = holding & self.lenders
        if not lending:
            return holding
        borrowing = self._unions.get(lending)
        return holding | (self._union(lending) if borrowing is None else borrowing)

    def _union(self, lending: int) -> int:
        if len(self._unions) >= _UNIONS_LIMIT:
            self._unions.clear()
        borrowing = 0
        for bit, borrowers in self._borrower_masks.items():
            if lending & bit:
                borrowing |= borrowers
        self._unions[lending] = borrowing
        return borrowing

    def _rebuild_mask(self, lender: CandidateId) -> None:
        """Rebuild the masks of a lender from its current borrowers."""
        number = self._open.get(lender)
        if number is None:
            return
        bit = 1 << number
        self._unions.clear()
        borrowers = self._borrowers_of.get(lender)
        if borrowers is None:
            self._borrower_masks.pop(bit, None)
            self.lenders &= ~bit
        else:
            self._borrower_masks[bit] = self._mask(borrowers)
            self.lenders |= bit

    def _mask(self, candidates: Iterable[CandidateId]) -> int:
        """Return the mask of those candidates that have a slot."""
        return sum(1 << self._open[candidate] for candidate in candidates if candidate in self._open)

    def validate(self) -> None:
        """Assert every invariant."""
        pairs = {(borrower, lender) for lender, borrowers in self._borrowers_of.items() for borrower in borrowers}
        assert pairs == set(self._lender_of.items())
        assert all(self._borrowers_of.values())
        assert not self._lender_of.keys() & self._borrowers_of.keys()
        assert len(set(self._open.values())) == len(self._open), "two candidates in one slot"
        assert self._borrower_masks == {
            1 << self._open[lender]: self._mask(borrowers)
            for lender, borrowers in self._borrowers_of.items()
            if lender in self._open
        }
        assert self.lenders == sum(self._borrower_masks)
        assert len(self._unions) <= _UNIONS_LIMIT
        for lending, borrowing in self._unions.items():
            lent_to = [borrowers for bit, borrowers in self._borrower_masks.items() if bit & lending]
            assert borrowing == reduce(or_, lent_to, 0)
