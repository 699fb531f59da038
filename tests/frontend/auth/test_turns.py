from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.frontend.auth.turns import Turns


def joined(places: int, own: int, *waiting: str) -> Turns[str]:
    """Return turns at which these wait; each one's key is its first letter."""
    turns: Turns[str] = Turns(places, own)
    for name in waiting:
        turns.join(name[0], name)
    return turns


def served(turns: Turns[str], slow: str = "") -> list[str]:
    """Serve all, one after another, and return them in the order of their turns; `slow` are keys."""
    order = []
    while found := list(turns.pop()):
        for name in found:
            order.append(name)
            turns.end(name[0], too_much=name[0] in slow)
        turns.validate()
    return order


def test_keys_take_turns_however_many_of_one_wait() -> None:
    assert served(joined(1, 1, "a1", "a2", "a3", "b1", "c1", "c2")) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_key_whose_last_turn_took_too_much_waits_for_all_whose_did_not() -> None:
    turns = joined(1, 1, "a1", "a2", "a3", "b1", "b2", "b3")
    assert served(turns, slow="a") == ["a1", "b1", "b2", "b3", "a2", "a3"]
    turns.join("a", "a4")
    turns.join("b", "b4")
    assert served(turns) == ["b4", "a4"]
    turns.join("a", "a5")
    turns.join("b", "b5")
    assert served(turns) == ["a5", "b5"], "its last turn took little"


def test_slow_keys_and_a_key_alone_leave_a_place_to_others() -> None:
    turns = joined(3, 2, "a1", "a2", "a3", "b1", "b2")
    assert list(turns.pop()) == ["a1", "b1", "a2"]
    for key in "aab":
        turns.end(key, too_much=True)
    assert list(turns.pop()) == ["b2", "a3"]
    turns.join("a", "a4")
    turns.join("b", "b3")
    assert list(turns.pop()) == []
    turns.join("c", "c1")
    assert list(turns.pop()) == ["c1"]


def test_without_keys_all_places_are_used_in_the_order_of_arrival() -> None:
    turns: Turns[int] = Turns(2, 1)
    for number in range(3):
        turns.join("", number)
    assert list(turns.pop()) == [0, 1]
    turns.end("", too_much=True)
    assert list(turns.pop()) == [2]


def test_one_that_gives_up_is_not_served() -> None:
    turns = joined(1, 1, "a1", "a2", "b1")
    turns.leave("a", "a1")
    turns.leave("b", "b1")
    assert served(turns) == ["a2"]


class TurnsMachine(RuleBasedStateMachine):
    """Waiting and served ones of three keys, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns[int] = Turns(3, 2)
        self.waiting: list[tuple[str, int]] = []
        self.served: list[str] = []
        self.count = 0

    @rule(key=st.sampled_from(["", "a", "b", "c"]))
    def join(self, key: str) -> None:
        self.count += 1
        self.turns.join(key, self.count)
        self.waiting.append((key, self.count))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        gone = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(gone)
        self.turns.leave(*gone)

    @precondition(lambda self: self.served)
    @rule(too_much=st.booleans(), data=st.data())
    def end(self, too_much: bool, data: Any) -> None:
        key = data.draw(st.sampled_from(self.served))
        self.served.remove(key)
        self.turns.end(key, too_much=too_much)

    @rule()
    def pop(self) -> None:
        for number in self.turns.pop():
            [found] = [one for one in self.waiting if one[1] == number]
            key = found[0]
            assert number == min(other for name, other in self.waiting if name == key)
            self.waiting.remove(found)
            self.served.append(key)
        assert self.served or not self.waiting, "one that is alone is served"

    @invariant()
    def holds(self) -> None:
        self.turns.validate()


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(max_examples=30, stateful_step_count=30)


def test_it_needs_a_place() -> None:
    with pytest.raises(AssertionError):
        Turns(0, 1)
