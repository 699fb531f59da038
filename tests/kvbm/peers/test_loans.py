"""Loans: no slot of a loan is released while a connection may still send it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvbm.peers.loans import LoanEnds, LoanLimits, LoanRefused, Loans

LIMITS = LoanLimits(loans=4, size_bytes=40)
BLOCK_BYTES = 2
CONNECTIONS = st.integers(1, 4)


def loans() -> Loans:
    return Loans(LIMITS)


def test_a_loan_that_nothing_sends_is_released_when_it_is_given_back() -> None:
    lent = loans()
    loan = lent.open(1, [3, 4], BLOCK_BYTES, 9.0)
    assert lent.give_back(2, loan) == LoanEnds([], []), "it was not opened on that connection"
    assert lent.give_back(1, loan) == LoanEnds([], [loan])
    assert lent.give_back(1, loan) == LoanEnds([], [])


def test_a_loan_that_is_given_back_early_waits_until_its_bytes_have_arrived() -> None:
    lent = loans()
    loan = lent.open(1, [3, 4], BLOCK_BYTES, 9.0)
    assert lent.take(2, loan, [1]) == [4]
    assert lent.give_back(1, loan) == LoanEnds([], [])
    with pytest.raises(LoanRefused):
        lent.take(3, loan, [0])
    assert lent.arrived(2) == LoanEnds([], [loan])


def test_a_deadline_cuts_the_connections_and_waits_for_them() -> None:
    lent = loans()
    loan = lent.open(1, [3, 4], BLOCK_BYTES, 9.0)
    lent.take(2, loan, [1])
    lent.take(3, loan, [0])
    assert lent.expire(8.9) == LoanEnds([], [])
    assert lent.expire(9.0) == LoanEnds([2, 3], [])
    assert lent.expire(9.1) == LoanEnds([], []), "they are cut once"
    assert lent.connection_closed(2) == LoanEnds([], [])
    assert lent.connection_closed(3) == LoanEnds([], [loan])


def test_a_deadline_also_ends_what_was_given_back_and_does_not_arrive() -> None:
    lent = loans()
    loan = lent.open(1, [3], BLOCK_BYTES, 9.0)
    lent.take(2, loan, [0])
    assert lent.give_back(1, loan) == LoanEnds([], [])
    assert lent.expire(9.0) == LoanEnds([2], [])
    assert lent.connection_closed(2) == LoanEnds([], [loan])


def test_a_loan_ends_with_the_connection_that_opened_it() -> None:
    lent = loans()
    loan = lent.open(1, [3], BLOCK_BYTES, 9.0)
    lent.take(1, loan, [0])
    assert lent.connection_closed(1) == LoanEnds([], [loan])


@pytest.mark.parametrize("indices", [[], [2], [-1], [0, 0]])
def test_blocks_that_a_loan_does_not_have_are_refused(indices: list[int]) -> None:
    lent = loans()
    loan = lent.open(1, [3, 4], BLOCK_BYTES, 9.0)
    with pytest.raises(LoanRefused) as refused:
        lent.take(1, loan, indices)
    assert refused.value.code == "bad_request"
    lent.validate()


def test_there_is_no_room_beyond_the_limits() -> None:
    lent = loans()
    lent.open(1, list(range(19)), BLOCK_BYTES, 9.0)
    assert lent.room_bytes == 2
    for _ in range(3):
        assert lent.size_bytes == 38 or lent.room_bytes == 0
        if lent.room_bytes:
            lent.open(1, [30], BLOCK_BYTES, 9.0)
    assert lent.room_bytes == 0


class LoanMachine(RuleBasedStateMachine):
    """A model that knows which slots connections may still send."""

    def __init__(self) -> None:
        super().__init__()
        self.loans = loans()
        self.now_s = 0.0
        self.slot = 0
        self.held: dict[int, list[int]] = {}
        """The slots of each loan that was not released."""
        self.on_wire: dict[int, int] = {}
        """Connection → the loan that it sends."""

    def done(self, ends: LoanEnds) -> None:
        for loan in ends.released:
            del self.held[loan]
            assert loan not in self.on_wire.values(), "released while it is sent"
        for connection in ends.cut:
            assert connection in self.on_wire, "cut, and it sends nothing"

    @rule(connection=CONNECTIONS, blocks=st.integers(1, 5), limit_s=st.integers(1, 5))
    def open(self, connection: int, blocks: int, limit_s: int) -> None:
        if self.loans.room_bytes >= blocks * BLOCK_BYTES:
            slots = list(range(self.slot, self.slot + blocks))
            self.slot += blocks
            loan = self.loans.open(connection, slots, BLOCK_BYTES, self.now_s + limit_s)
            self.held[loan] = slots

    @rule(connection=CONNECTIONS, which=st.integers(0, 5), first=st.integers(-1, 5))
    def take(self, connection: int, which: int, first: int) -> None:
        self.arrive(connection)
        loan = sorted(self.held)[which] if which < len(self.held) else 999
        try:
            slots = self.loans.take(connection, loan, [first])
        except LoanRefused:
            return
        assert slots == [self.held[loan][first]]
        self.on_wire[connection] = loan

    @rule(connection=CONNECTIONS)
    def report(self, connection: int) -> None:
        self.arrive(connection)

    def arrive(self, connection: int) -> None:
        self.on_wire.pop(connection, None)
        self.done(self.loans.arrived(connection))

    @rule(connection=CONNECTIONS, which=st.integers(0, 5))
    def give_back(self, connection: int, which: int) -> None:
        if which < len(self.held):
            self.done(self.loans.give_back(connection, sorted(self.held)[which]))

    @rule(connection=CONNECTIONS)
    def close(self, connection: int) -> None:
        self.on_wire.pop(connection, None)
        self.done(self.loans.connection_closed(connection))

    @rule(passed_s=st.integers(1, 3))
    def expire(self, passed_s: int) -> None:
        self.now_s += passed_s
        self.done(self.loans.expire(self.now_s))

    @invariant()
    def agrees(self) -> None:
        self.loans.validate()
        assert len(self.loans) == len(self.held)
        assert self.loans.size_bytes == BLOCK_BYTES * sum(map(len, self.held.values()))

    def teardown(self) -> None:
        """When all connections are closed nothing is lent."""
        for connection in range(1, 5):
            self.on_wire.pop(connection, None)
            self.done(self.loans.connection_closed(connection))
        assert not self.held


LoanMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestLoanMachine = LoanMachine.TestCase
