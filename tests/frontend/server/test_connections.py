from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.server.connections import EVICTABLE_AFTER_S, Connections

LIMIT = 4


def connections(*opened: str) -> Connections[str]:
    made: Connections[str] = Connections(limit=LIMIT, idle_s=60.0, header_s=5.0)
    for now, one in enumerate(opened):
        made.add(one, float(now))
    return made


def test_an_idle_connection_is_closed_after_its_time() -> None:
    those = connections("a", "b")
    assert list(those.pop_overdue(59.9)) == []
    assert list(those.pop_overdue(60.0)) == [("a", "idle")]
    assert list(those.pop_overdue(60.0)) == []
    assert those.idle == ["b"]


def test_a_begun_header_has_less_time_and_more_bytes_do_not_lengthen_it() -> None:
    those = connections("a", "b")
    those.bytes_received("a", 50.0)
    those.bytes_received("a", 54.0)
    assert list(those.pop_overdue(54.9)) == []
    assert list(those.pop_overdue(55.0)) == [("a", "header")]


def test_a_busy_connection_is_left_alone_and_idle_after_its_answer() -> None:
    those = connections("a")
    those.bytes_received("a", 1.0)
    those.request_began("a")
    those.bytes_received("a", 2.0)
    assert list(those.pop_overdue(1000.0)) == []
    those.request_ended("a", 1000.0)
    assert list(those.pop_overdue(1059.0)) == []
    assert list(those.pop_overdue(1060.0)) == [("a", "idle")]


def test_at_the_limit_the_longest_idle_makes_room() -> None:
    those = connections("a", "b", "c", "d")
    those.request_began("a")
    assert those.full
    assert those.to_evict(10.0) == "b"
    those.remove("b")
    assert not those.full


def test_below_the_limit_no_connection_is_closed() -> None:
    assert connections("a", "b").to_evict(1000.0) is None


def test_a_connection_that_has_just_become_idle_or_has_begun_a_request_is_not_evicted() -> None:
    those = connections("a", "b", "c", "d")
    for one in "bcd":
        those.request_began(one)
    those.request_began("a")
    those.request_ended("a", 10.0)
    assert those.to_evict(10.0 + EVICTABLE_AFTER_S / 2) is None
    assert those.to_evict(10.0 + EVICTABLE_AFTER_S) == "a"
    those.bytes_received("a", 12.0)
    assert those.to_evict(20.0) is None
    assert those.full


def test_reports_about_a_removed_connection_change_nothing() -> None:
    those = connections("a")
    those.request_began("a")
    those.remove("a")
    those.remove("a")
    those.request_ended("a", 5.0)
    those.bytes_received("a", 5.0)
    those.request_began("a")
    assert len(those) == 0


class ConnectionsMachine(RuleBasedStateMachine):
    """Drives a few connections through all events, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.those = connections()
        self.now = 0.0

    @rule(one=st.integers(0, 6).map(str), step=st.sampled_from(["open", "heard", "began", "answered", "gone"]))
    def befall(self, one: str, step: str) -> None:
        match step:
            case "open":
                if (longest := self.those.to_evict(self.now)) is not None:
                    self.those.remove(longest)
                self.those.remove(one)
                if not self.those.full:
                    self.those.add(one, self.now)
            case "heard":
                self.those.bytes_received(one, self.now)
            case "began":
                self.those.request_began(one)
            case "answered":
                self.those.request_ended(one, self.now)
            case _:
                self.those.remove(one)

    @rule(passed=st.floats(0, 40))
    def wait(self, passed: float) -> None:
        self.now += passed
        for one, _ in list(self.those.pop_overdue(self.now)):
            assert one not in self.those.idle

    @invariant()
    def holds(self) -> None:
        self.those.validate()


TestConnections = ConnectionsMachine.TestCase
