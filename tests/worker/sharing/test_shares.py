"""Lending in any order of events: a slot is returned exactly once, and only for a reason that proves its end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.sharing.shares import MOST_WHOLE, QUIET_S, Lending, LendingLimits, LendingRefused

LIMITS = LendingLimits(readers=3, loans=2, blocks=8)


def keys(*slots: int) -> list[bytes]:
    """Return the keys of blocks; the block in slot n has the key n."""
    return [bytes([slot]) for slot in slots]


def lend(lending: Lending, connection: int, number: int, slots: list[int]) -> None:
    """Lend blocks that are all there."""
    lending.open_loan(connection, number, keys(*slots), 0.0)
    [loan] = [loan for at, name, loan in lending.waiting() if (at, name) == (connection, number)]
    assert lending.add(loan, slots, 0.0)


OWNERS = [f"reader-{number}" for number in range(4)]


def test_a_closed_connection_returns_nothing_and_death_returns_all() -> None:
    lending = Lending(LIMITS)
    assert lending.admit(1, "a") == []
    lend(lending, 1, 5, [3, 4])
    lend(lending, 1, 6, [4])
    lending.connection_closed(1)
    assert (lending.readers, lending.blocks) == (["a"], 3)
    assert sorted(lending.proven_dead("a")) == [3, 4, 4]
    assert (lending.readers, lending.blocks) == ([], 0)


def test_a_reader_that_is_admitted_again_has_returned_what_it_had() -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    lend(lending, 1, 5, [3, 4])
    assert lending.admit(2, "a") == [3, 4]
    lending.connection_closed(1)
    lend(lending, 2, 5, [7])
    assert lending.release(2, 5) == [7]
    assert lending.release(2, 5) == []


@pytest.mark.parametrize("silent", [False, True])
def test_memory_may_be_freed_when_lending_is_closed_and_the_last_reader_is_gone(silent: bool) -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    assert not lending.may_free
    if silent:
        lending.connection_closed(1)
    assert lending.close() == ([] if silent else [1])
    assert not lending.may_free
    with pytest.raises(LendingRefused, match="lends nothing more"):
        lending.admit(2, "b")
    if silent:
        lending.proven_dead("a")
    else:
        with pytest.raises(LendingRefused, match="lends nothing more"):
            lending.open_loan(1, 1, keys(1), 0.0)
        lending.leave(1)
    assert lending.may_free


def test_a_loan_waits_for_its_blocks_and_no_longer_than_it_is_quiet() -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    lending.open_loan(1, 1, keys(1, 2, 3), 0.0)
    [(_, _, loan)] = lending.waiting()
    assert not lending.add(loan, [], 1.0)
    assert lending.add(loan, [1], 9.0)
    assert lending.is_borrowed(b"\3")
    assert not lending.is_borrowed(b"\2")
    assert not lending.add(loan, [], 9.0 + QUIET_S - 0.1)
    assert lending.add(loan, [], 9.0 + QUIET_S)
    assert not loan.waits
    assert not lending.is_borrowed(b"\3")
    assert lending.release(1, 1) == [1], "only the reader's word returns it"


def test_a_loan_whose_last_block_is_there_waits_no_longer() -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    lend(lending, 1, 1, [1, 2])
    assert lending.waiting() == []


@pytest.mark.parametrize("end", ["closed", "dead", "leaves", "again"])
def test_the_last_block_of_a_loan_that_was_lent_whole_counts_as_borrowed_while_its_reader_is_there(end: str) -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    lend(lending, 1, 1, [1, 2])
    assert lending.is_borrowed(b"\2")
    assert not lending.is_borrowed(b"\1")
    lending.release(1, 1)
    assert lending.is_borrowed(b"\2"), "its reader has copied it before the prompt's last token was computed"
    match end:
        case "closed":
            lending.connection_closed(1)
        case "dead":
            lending.proven_dead("a")
        case "leaves":
            lending.leave(1)
        case _:
            lending.admit(2, "a")
    assert not lending.is_borrowed(b"\2")
    lending.validate()


def test_of_loans_that_were_lent_whole_the_newest_are_remembered() -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    for number in range(MOST_WHOLE + 1):
        lend(lending, 1, number, [number])
        lending.release(1, number)
    assert not lending.is_borrowed(b"\0")
    assert all(lending.is_borrowed(bytes([number])) for number in range(1, MOST_WHOLE + 1))
    lending.validate()


def test_closing_lets_no_loan_wait_and_ending_all_returns_every_slot() -> None:
    lending = Lending(LIMITS)
    lending.admit(1, "a")
    lending.open_loan(1, 1, keys(1, 2), 0.0)
    [(_, _, loan)] = lending.waiting()
    lending.add(loan, [1], 0.0)
    assert lending.close() == [1]
    assert lending.waiting() == []
    assert lending.end_all() == [1]
    assert lending.may_free


class LendingMachine(RuleBasedStateMachine):
    """Readers come, borrow, return, fall silent, come again and die; a model counts what each may still read."""

    def __init__(self) -> None:
        super().__init__()
        self.lending = Lending(LIMITS)
        self.next = 0
        self.connections: dict[int, str] = {}
        self.held: dict[str, dict[int, list[int]]] = {}
        self.kept: list[list[int]] = []
        """All loans, so that each has another id."""
        self.sizes: dict[int, int] = {}
        """The blocks that each loan was asked for, by its id."""

    def returned(self, slots: list[int], owner: str) -> None:
        loans = self.held.pop(owner, {})
        assert Counter(slots) == Counter(slot for loan in loans.values() for slot in loan)

    def disconnect(self, owner: str) -> None:
        self.connections = {number: name for number, name in self.connections.items() if name != owner}

    @rule(owner=st.sampled_from(OWNERS))
    def admit(self, owner: str) -> None:
        self.next += 1
        allowed = not self.lending.closing and (owner in self.held or len(self.held) < LIMITS.readers)
        if not allowed:
            with pytest.raises(LendingRefused):
                self.lending.admit(self.next, owner)
            return
        self.returned(self.lending.admit(self.next, owner), owner)
        self.disconnect(owner)
        self.held[owner] = {}
        self.connections[self.next] = owner

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), number=st.integers(0, 3), size=st.integers(1, 5))
    def borrow(self, data: st.DataObject, number: int, size: int) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        loans = self.held[self.connections[connection]]
        asked = sum(self.sizes[id(loan)] for reader in self.held.values() for loan in reader.values())
        full = len(loans) >= LIMITS.loans or number in loans or asked + size > LIMITS.blocks
        if full or self.lending.closing:
            with pytest.raises(LendingRefused):
                self.lending.open_loan(connection, number, keys(*range(size)), 0.0)
            return
        self.lending.open_loan(connection, number, keys(*range(size)), 0.0)
        loans[number] = []
        self.sizes[id(loans[number])] = size
        self.kept.append(loans[number])

    @precondition(lambda self: self.lending.waiting())
    @rule(data=st.data(), more=st.integers(0, 5))
    def compute(self, data: st.DataObject, more: int) -> None:
        connection, number, loan = data.draw(st.sampled_from(self.lending.waiting()))
        slots = list(range(20))[:more][: len(loan.keys) - len(loan.slots)]
        assert self.lending.add(loan, slots, 0.0) == bool(slots)
        self.held[self.connections[connection]][number] += slots

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), number=st.integers(0, 3))
    def release(self, data: st.DataObject, number: int) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        assert self.lending.release(connection, number) == self.held[self.connections[connection]].pop(number, [])

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), leaves=st.booleans())
    def end_connection(self, data: st.DataObject, leaves: bool) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        owner = self.connections.pop(connection)
        if leaves:
            self.returned(self.lending.leave(connection), owner)
        self.lending.connection_closed(connection)

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        self.returned(self.lending.proven_dead(owner), owner)
        self.disconnect(owner)

    @rule()
    def close(self) -> None:
        assert sorted(self.lending.close()) == sorted(self.connections)

    @invariant()
    def agrees(self) -> None:
        self.lending.validate()
        assert set(self.lending.readers) == set(self.held)
        assert self.lending.may_free == (self.lending.closing and not self.held)


TestLendingMachine = LendingMachine.TestCase
TestLendingMachine.settings = settings(max_examples=60, stateful_step_count=40)
