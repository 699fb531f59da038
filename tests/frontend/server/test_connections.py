from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.server.connections import SPARED_S, Connections

LIMIT = 4


def connections(*opened: str) -> Connections[str]:
    made: Connections[str] = Connections(limit=LIMIT, idle_s=60.0, header_s=5.0)
    for now, one in enumerate(opened):
        made.opened(one, float(now))
    return made


def test_one_that_asks_nothing_is_closed_after_its_time() -> None:
    those = connections("a", "b")
    assert list(those.due(59.9)) == []
    assert list(those.due(60.0)) == [("a", "idle")]
    assert list(those.due(60.0)) == []
    assert those.idle == ["b"]


def test_one_that_begins_a_head_has_less_time_and_more_bytes_do_not_lengthen_it() -> None:
    those = connections("a", "b")
    those.heard("a", 50.0)
    those.heard("a", 54.0)
    assert list(those.due(54.9)) == []
    assert list(those.due(55.0)) == [("a", "header")]


def test_one_with_a_request_is_left_alone_and_idle_from_its_answer_on() -> None:
    those = connections("a")
    those.heard("a", 1.0)
    those.began("a")
    those.heard("a", 2.0)
    assert list(those.due(1000.0)) == []
    those.answered("a", 1000.0)
    assert list(those.due(1059.0)) == []
    assert list(those.due(1060.0)) == [("a", "idle")]


def test_at_the_limit_the_longest_idle_makes_room() -> None:
    those = connections("a", "b", "c", "d")
    those.began("a")
    assert those.full
    assert those.room(10.0) == "b"
    those.gone("b")
    assert not those.full


def test_below_the_limit_nobody_need_go() -> None:
    assert connections("a", "b").room(1000.0) is None


def test_who_has_just_become_idle_is_spared_and_who_begins_to_ask_too() -> None:
    those = connections("a", "b", "c", "d")
    for one in "bcd":
        those.began(one)
    those.began("a")
    those.answered("a", 10.0)
    assert those.room(10.0 + SPARED_S / 2) is None
    assert those.room(10.0 + SPARED_S) == "a"
    those.heard("a", 12.0)
    assert those.room(20.0) is None
    assert those.full


def test_what_is_told_of_one_that_is_gone_changes_nothing() -> None:
    those = connections("a")
    those.began("a")
    those.gone("a")
    those.gone("a")
    those.answered("a", 5.0)
    those.heard("a", 5.0)
    those.began("a")
    assert len(those) == 0


class ConnectionsMachine(RuleBasedStateMachine):
    """Everything that may befall a few connections, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.those = connections()
        self.now = 0.0

    @rule(one=st.integers(0, 6).map(str), step=st.sampled_from(["open", "heard", "began", "answered", "gone"]))
    def befall(self, one: str, step: str) -> None:
        match step:
            case "open":
                if (longest := self.those.room(self.now)) is not None:
                    self.those.gone(longest)
                self.those.gone(one)
                if not self.those.full:
                    self.those.opened(one, self.now)
            case "heard":
                self.those.heard(one, self.now)
            case "began":
                self.those.began(one)
            case "answered":
                self.those.answered(one, self.now)
            case _:
                self.those.gone(one)

    @rule(passed=st.floats(0, 40))
    def wait(self, passed: float) -> None:
        self.now += passed
        for one, _ in list(self.those.due(self.now)):
            assert one not in self.those.idle

    @invariant()
    def holds(self) -> None:
        self.those.validate()


TestConnections = ConnectionsMachine.TestCase
