"""Borrowers and lenders before, while and after they have slots."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.index import inheritance
from services.router.index.inheritance import CandidateId, SharedStores

WORKERS: list[CandidateId] = [("a", 0), ("a", 1), ("b", 0)]
STORES: list[CandidateId] = [("k/l", 0), ("k/m", 0)]


def test_a_store_without_borrowers_is_not_a_lender() -> None:
    stores = SharedStores()
    stores.slot_opened(("k/l", 0), 0)
    stores.slot_opened(("a", 0), 1)
    assert (stores.lenders, stores.with_borrowers(0b01)) == (0, 0b01)
    stores.set_lender(("a", 0), ("k/l", 0))
    assert (stores.lenders, stores.with_borrowers(0b01), stores.with_borrowers(0b10)) == (0b01, 0b11, 0b10)
    stores.set_lender(("a", 0), None)
    assert (stores.lenders, stores.with_borrowers(0b01)) == (0, 0b01)


def test_a_borrower_cannot_lend() -> None:
    stores = SharedStores()
    stores.set_lender(("a", 0), ("k/l", 0))
    with pytest.raises(AssertionError, match="borrower"):
        stores.set_lender(("b", 0), ("a", 0))
    with pytest.raises(AssertionError, match="lender"):
        stores.set_lender(("k/l", 0), ("k/m", 0))


def test_the_memo_of_unions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inheritance, "_UNIONS_LIMIT", 3)
    stores = SharedStores()
    for number in range(4):
        stores.slot_opened((f"k{number}/l", 0), number)
        stores.slot_opened((f"w{number}", 0), 4 + number)
        stores.set_lender((f"w{number}", 0), (f"k{number}/l", 0))
    for holding in range(16):
        assert stores.with_borrowers(holding) == holding | holding << 4
        stores.validate()


class SharedStoresMachine(RuleBasedStateMachine):
    """Slots open and retire under any free number; borrowers change their lenders."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = SharedStores()
        self.numbers: dict[CandidateId, int] = {}
        self.lenders: dict[CandidateId, CandidateId] = {}

    @rule(candidate=st.sampled_from(WORKERS + STORES), number=st.integers(0, 9))
    def open_or_retire(self, candidate: CandidateId, number: int) -> None:
        if candidate in self.numbers:
            del self.numbers[candidate]
            self.stores.slot_retired(candidate)
        elif number not in self.numbers.values():
            self.numbers[candidate] = number
            self.stores.slot_opened(candidate, number)

    @rule(candidate=st.sampled_from(WORKERS), lender=st.sampled_from([*STORES, None]))
    def borrow(self, candidate: CandidateId, lender: CandidateId | None) -> None:
        self.stores.set_lender(candidate, lender)
        self.lenders.pop(candidate, None)
        if lender is not None:
            self.lenders[candidate] = lender

    @rule(holding=st.integers(0, (1 << 10) - 1))
    def widen(self, holding: int) -> None:
        expected = holding
        for borrower, lender in self.lenders.items():
            if borrower in self.numbers and lender in self.numbers and holding >> self.numbers[lender] & 1:
                expected |= 1 << self.numbers[borrower]
        assert self.stores.with_borrowers(holding) == expected

    @invariant()
    def valid(self) -> None:
        self.stores.validate()


TestLending = SharedStoresMachine.TestCase
TestLending.settings = settings(max_examples=80, stateful_step_count=30)
