"""Heirs and stores before, while and after they have slots."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.index import inheritance
from services.router.index.inheritance import CandidateId, Inheritance

WORKERS: list[CandidateId] = [("a", 0), ("a", 1), ("b", 0)]
STORES: list[CandidateId] = [("k/l", 0), ("k/m", 0)]


def test_a_store_without_heirs_is_not_in_the_mask_of_stores() -> None:
    inherited = Inheritance()
    inherited.slot_opened(("k/l", 0), 0)
    inherited.slot_opened(("a", 0), 1)
    assert (inherited.stores, inherited.with_heirs(0b01)) == (0, 0b01)
    inherited.set_store(("a", 0), ("k/l", 0))
    assert (inherited.stores, inherited.with_heirs(0b01), inherited.with_heirs(0b10)) == (0b01, 0b11, 0b10)
    inherited.set_store(("a", 0), None)
    assert (inherited.stores, inherited.with_heirs(0b01)) == (0, 0b01)


def test_nothing_inherits_from_an_heir() -> None:
    inherited = Inheritance()
    inherited.set_store(("a", 0), ("k/l", 0))
    with pytest.raises(AssertionError, match="heir"):
        inherited.set_store(("b", 0), ("a", 0))
    with pytest.raises(AssertionError, match="store"):
        inherited.set_store(("k/l", 0), ("k/m", 0))


def test_the_memo_of_unions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inheritance, "_UNIONS_LIMIT", 3)
    inherited = Inheritance()
    for number in range(4):
        inherited.slot_opened((f"k{number}/l", 0), number)
        inherited.slot_opened((f"w{number}", 0), 4 + number)
        inherited.set_store((f"w{number}", 0), (f"k{number}/l", 0))
    for holding in range(16):
        assert inherited.with_heirs(holding) == holding | holding << 4
        inherited.validate()


class InheritanceMachine(RuleBasedStateMachine):
    """Slots open and retire under any free number; heirs change their stores."""

    def __init__(self) -> None:
        super().__init__()
        self.inheritance = Inheritance()
        self.numbers: dict[CandidateId, int] = {}
        self.stores: dict[CandidateId, CandidateId] = {}

    @rule(candidate=st.sampled_from(WORKERS + STORES), number=st.integers(0, 9))
    def open_or_retire(self, candidate: CandidateId, number: int) -> None:
        if candidate in self.numbers:
            del self.numbers[candidate]
            self.inheritance.slot_retired(candidate)
        elif number not in self.numbers.values():
            self.numbers[candidate] = number
            self.inheritance.slot_opened(candidate, number)

    @rule(candidate=st.sampled_from(WORKERS), store=st.sampled_from([*STORES, None]))
    def inherit(self, candidate: CandidateId, store: CandidateId | None) -> None:
        self.inheritance.set_store(candidate, store)
        self.stores.pop(candidate, None)
        if store is not None:
            self.stores[candidate] = store

    @rule(holding=st.integers(0, (1 << 10) - 1))
    def widen(self, holding: int) -> None:
        expected = holding
        for heir, store in self.stores.items():
            if heir in self.numbers and store in self.numbers and holding >> self.numbers[store] & 1:
                expected |= 1 << self.numbers[heir]
        assert self.inheritance.with_heirs(holding) == expected

    @invariant()
    def valid(self) -> None:
        self.inheritance.validate()


TestInheritance = InheritanceMachine.TestCase
TestInheritance.settings = settings(max_examples=80, stateful_step_count=30)
