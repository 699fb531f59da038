"""Sharing in any order of events: a slot is returned exactly once, and only for a reason that proves its end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.sharing.shares import MOST_WHOLE, QUIET_S, Shares, SharingLimits, SharingRefused

LIMITS = SharingLimits(readers=3, shares=2, blocks=8)


def keys(*slots: int) -> list[bytes]:
    """Return the keys of blocks; the block in slot n has the key n."""
    return [bytes([slot]) for slot in slots]


def share(sharing: Shares, connection: int, number: int, slots: list[int]) -> None:
    """Share blocks that are all there."""
    sharing.open_share(connection, number, keys(*slots), 0.0)
    [share] = [share for at, name, share in sharing.waiting() if (at, name) == (connection, number)]
    assert sharing.add(share, slots, 0.0)


OWNERS = [f"reader-{number}" for number in range(4)]


def test_a_closed_connection_returns_nothing_and_death_returns_all() -> None:
    sharing = Shares(LIMITS)
    assert sharing.admit(1, "a") == []
    share(sharing, 1, 5, [3, 4])
    share(sharing, 1, 6, [4])
    sharing.connection_closed(1)
    assert (sharing.readers, sharing.blocks) == (["a"], 3)
    assert sorted(sharing.proven_dead("a")) == [3, 4, 4]
    assert (sharing.readers, sharing.blocks) == ([], 0)


def test_a_reader_that_is_admitted_again_has_returned_what_it_had() -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    share(sharing, 1, 5, [3, 4])
    assert sharing.admit(2, "a") == [3, 4]
    sharing.connection_closed(1)
    share(sharing, 2, 5, [7])
    assert sharing.release(2, 5) == [7]
    assert sharing.release(2, 5) == []


@pytest.mark.parametrize("silent", [False, True])
def test_memory_may_be_freed_when_sharing_is_closed_and_the_last_reader_is_gone(silent: bool) -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    assert not sharing.may_free
    if silent:
        sharing.connection_closed(1)
    assert sharing.close() == ([] if silent else [1])
    assert not sharing.may_free
    with pytest.raises(SharingRefused, match="shares nothing more"):
        sharing.admit(2, "b")
    if silent:
        sharing.proven_dead("a")
    else:
        with pytest.raises(SharingRefused, match="shares nothing more"):
            sharing.open_share(1, 1, keys(1), 0.0)
        sharing.leave(1)
    assert sharing.may_free


def test_a_share_waits_for_its_blocks_and_no_longer_than_it_is_quiet() -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    sharing.open_share(1, 1, keys(1, 2, 3), 0.0)
    [(_, _, share)] = sharing.waiting()
    assert not sharing.add(share, [], 1.0)
    assert sharing.add(share, [1], 9.0)
    assert sharing.is_shared(b"\3")
    assert not sharing.is_shared(b"\2")
    assert not sharing.add(share, [], 9.0 + QUIET_S - 0.1)
    assert sharing.add(share, [], 9.0 + QUIET_S)
    assert not share.waits
    assert not sharing.is_shared(b"\3")
    assert sharing.release(1, 1) == [1], "only the reader's word returns it"


def test_a_share_whose_last_block_is_there_waits_no_longer() -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    share(sharing, 1, 1, [1, 2])
    assert sharing.waiting() == []


@pytest.mark.parametrize("end", ["closed", "dead", "leaves", "again"])
def test_the_last_block_of_a_share_that_was_shared_whole_counts_as_shared_while_its_reader_is_there(end: str) -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    share(sharing, 1, 1, [1, 2])
    assert sharing.is_shared(b"\2")
    assert not sharing.is_shared(b"\1")
    sharing.release(1, 1)
    assert sharing.is_shared(b"\2"), "its reader has copied it before the prompt's last token was computed"
    match end:
        case "closed":
            sharing.connection_closed(1)
        case "dead":
            sharing.proven_dead("a")
        case "leaves":
            sharing.leave(1)
        case _:
            sharing.admit(2, "a")
    assert not sharing.is_shared(b"\2")
    sharing.validate()


def test_of_shares_that_were_shared_whole_the_newest_are_remembered() -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    for number in range(MOST_WHOLE + 1):
        share(sharing, 1, number, [number])
        sharing.release(1, number)
    assert not sharing.is_shared(b"\0")
    assert all(sharing.is_shared(bytes([number])) for number in range(1, MOST_WHOLE + 1))
    sharing.validate()


def test_closing_lets_no_share_wait_and_ending_all_returns_every_slot() -> None:
    sharing = Shares(LIMITS)
    sharing.admit(1, "a")
    sharing.open_share(1, 1, keys(1, 2), 0.0)
    [(_, _, share)] = sharing.waiting()
    sharing.add(share, [1], 0.0)
    assert sharing.close() == [1]
    assert sharing.waiting() == []
    assert sharing.end_all() == [1]
    assert sharing.may_free


class LendingMachine(RuleBasedStateMachine):
    """Readers come, read, return, fall silent, come again and die; a model counts what each may still read."""

    def __init__(self) -> None:
        super().__init__()
        self.sharing = Shares(LIMITS)
        self.next = 0
        self.connections: dict[int, str] = {}
        self.held: dict[str, dict[int, list[int]]] = {}
        self.kept: list[list[int]] = []
        """All shares, so that each has another id."""
        self.sizes: dict[int, int] = {}
        """The blocks that each share was asked for, by its id."""

    def returned(self, slots: list[int], owner: str) -> None:
        shares = self.held.pop(owner, {})
        assert Counter(slots) == Counter(slot for share in shares.values() for slot in share)

    def disconnect(self, owner: str) -> None:
        self.connections = {number: name for number, name in self.connections.items() if name != owner}

    @rule(owner=st.sampled_from(OWNERS))
    def admit(self, owner: str) -> None:
        self.next += 1
        allowed = not self.sharing.closing and (owner in self.held or len(self.held) < LIMITS.readers)
        if not allowed:
            with pytest.raises(SharingRefused):
                self.sharing.admit(self.next, owner)
            return
        self.returned(self.sharing.admit(self.next, owner), owner)
        self.disconnect(owner)
        self.held[owner] = {}
        self.connections[self.next] = owner

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), number=st.integers(0, 3), size=st.integers(1, 5))
    def read(self, data: st.DataObject, number: int, size: int) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        shares = self.held[self.connections[connection]]
        asked = sum(self.sizes[id(share)] for reader in self.held.values() for share in reader.values())
        full = len(shares) >= LIMITS.shares or number in shares or asked + size > LIMITS.blocks
        if full or self.sharing.closing:
            with pytest.raises(SharingRefused):
                self.sharing.open_share(connection, number, keys(*range(size)), 0.0)
            return
        self.sharing.open_share(connection, number, keys(*range(size)), 0.0)
        shares[number] = []
        self.sizes[id(shares[number])] = size
        self.kept.append(shares[number])

    @precondition(lambda self: self.sharing.waiting())
    @rule(data=st.data(), more=st.integers(0, 5))
    def compute(self, data: st.DataObject, more: int) -> None:
        connection, number, share = data.draw(st.sampled_from(self.sharing.waiting()))
        slots = list(range(20))[:more][: len(share.keys) - len(share.slots)]
        assert self.sharing.add(share, slots, 0.0) == bool(slots)
        self.held[self.connections[connection]][number] += slots

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), number=st.integers(0, 3))
    def release(self, data: st.DataObject, number: int) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        assert self.sharing.release(connection, number) == self.held[self.connections[connection]].pop(number, [])

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), leaves=st.booleans())
    def end_connection(self, data: st.DataObject, leaves: bool) -> None:
        connection = data.draw(st.sampled_from(sorted(self.connections)))
        owner = self.connections.pop(connection)
        if leaves:
            self.returned(self.sharing.leave(connection), owner)
        self.sharing.connection_closed(connection)

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        self.returned(self.sharing.proven_dead(owner), owner)
        self.disconnect(owner)

    @rule()
    def close(self) -> None:
        assert sorted(self.sharing.close()) == sorted(self.connections)

    @invariant()
    def agrees(self) -> None:
        self.sharing.validate()
        assert set(self.sharing.readers) == set(self.held)
        assert self.sharing.may_free == (self.sharing.closing and not self.held)


TestLendingMachine = LendingMachine.TestCase
TestLendingMachine.settings = settings(max_examples=60, stateful_step_count=40)
