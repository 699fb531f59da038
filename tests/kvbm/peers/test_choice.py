"""Which peers are asked, and how many blocks are worth reading."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvbm.peers.choice import FIRST_RATE, REST_MOST_S, PeerChoice
from services.kvbm.peers.messages import PeerAddress

ONE, TWO, THREE = (PeerAddress(name, "host", port) for port, name in enumerate(("one", "two", "three"), 1))


def choice() -> PeerChoice:
    made = PeerChoice(least_blocks=4, asked=2)
    for peer in (ONE, TWO, THREE):
        made.learn(peer, ["l"])
    return made


def test_the_fastest_peers_with_the_layout_are_asked() -> None:
    made = choice()
    made.read_done("three", 10**10, 1.0)
    made.read_done("one", 10**6, 1.0)
    assert made.candidates("l", 0.0) == [THREE, TWO]
    assert made.candidates("other", 0.0) == []
    made.learn(THREE, ["other"])
    assert made.candidates("l", 0.0) == [TWO, ONE]


def test_a_peer_that_failed_rests_longer_each_time_until_it_is_read() -> None:
    made = PeerChoice(4, 2)
    made.learn(ONE, ["l"])
    for rest_s in (1.0, 2.0, 4.0):
        made.failed("one", 100.0)
        assert made.candidates("l", 100.0 + rest_s - 0.01) == []
        assert made.candidates("l", 100.0 + rest_s) == [ONE]
    for _ in range(20):
        made.failed("one", 100.0)
    assert made.candidates("l", 100.0 + REST_MOST_S) == [ONE]
    made.read_done("one", 1000, 0.1)
    made.failed("one", 100.0)
    assert made.candidates("l", 101.0) == [ONE]


def test_as_many_blocks_are_read_as_the_time_allows_but_not_too_few() -> None:
    made = choice()
    block_bytes = int(FIRST_RATE / 100)
    assert made.worth("one", 50, block_bytes, 1.0, 100.0) == 50
    assert made.worth("one", 50, block_bytes, 0.2, 100.0) == 20
    assert made.worth("one", 50, block_bytes, 0.03, 100.0) == 0
    assert made.worth("one", 3, block_bytes, 1.0, 100.0) == 0
    assert made.worth("one", 50, block_bytes, -1.0, 100.0) == 0
    assert made.worth("unknown", 50, block_bytes, 1.0, 100.0) == 0


def test_a_peer_that_was_too_slow_is_read_now_and_then_and_so_is_found_to_be_fast_again() -> None:
    made = choice()
    block_bytes = 1 << 20
    assert made.worth("one", 50, block_bytes, 1.0, 100.0) == 50
    made.read_done("one", block_bytes, 1.0)  # it stood still for most of the read
    until_s = 100.0 + REST_MOST_S
    assert made.worth("one", 50, block_bytes, 1.0, until_s - 0.1) == 0
    assert made.worth("one", 3, block_bytes, 1.0, until_s) == 0
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 4
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 0
    made.read_done("one", 4 * block_bytes, 0.01)
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 50


def test_a_peer_at_another_address_is_measured_again_and_one_that_left_is_not_asked() -> None:
    made = PeerChoice(4, 2)
    made.learn(ONE, ["l"])
    made.read_done("one", 10**9, 1.0)
    made.failed("one", 100.0)
    moved = PeerAddress("one", "elsewhere", 9)
    made.learn(moved, ["l"])
    assert made.candidates("l", 0.0) == [moved]
    assert made.known["one"].rate == FIRST_RATE
    assert made.forget("one")
    assert not made.forget("one")
    assert made.candidates("l", 0.0) == []


def test_the_first_read_replaces_the_assumed_rate_and_later_ones_change_it_a_little() -> None:
    made = choice()
    made.read_done("one", 10**10, 1.0)
    assert made.rates(0.0)["one"] == 1e10
    made.read_done("one", 10**9, 1.0)
    assert made.rates(0.0)["one"] == 1e10 + 0.3 * (1e9 - 1e10)


def test_rates_are_those_of_the_peers_that_are_asked_first() -> None:
    made = choice()
    made.read_done("three", 10**10, 1.0)
    made.read_done("one", 10**6, 1.0)
    assert made.rates(0.0) == {"three": 1e10, "two": FIRST_RATE}
    made.failed("three", 5.0)
    assert made.rates(5.5) == {"two": FIRST_RATE, "one": 1e6}


class ChoiceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.choice = PeerChoice(4, 2)
        self.now_s = 0.0

    names = st.sampled_from(("one", "two", "three"))

    @rule(name=names, port=st.integers(1, 2), layouts=st.sets(st.sampled_from("lm")))
    def learn(self, name: str, port: int, layouts: set[str]) -> None:
        self.choice.learn(PeerAddress(name, "host", port), layouts)

    @rule(name=names)
    def forget(self, name: str) -> None:
        self.choice.forget(name)

    @rule(name=names, passed_s=st.floats(0, 100))
    def fail(self, name: str, passed_s: float) -> None:
        self.now_s += passed_s
        self.choice.failed(name, self.now_s)
        assert all(peer.instance != name for peer in self.choice.candidates("l", self.now_s))
        assert name not in self.choice.known or self.choice.known[name].rests_until_s <= self.now_s + REST_MOST_S

    @rule(name=names, size_bytes=st.integers(0, 10**12), took_s=st.floats(0, 100))
    def read(self, name: str, size_bytes: int, took_s: float) -> None:
        self.choice.read_done(name, size_bytes, took_s)

    @rule(name=names, blocks=st.integers(0, 100), left_s=st.floats(-1, 10))
    def ask(self, name: str, blocks: int, left_s: float) -> None:
        worth = self.choice.worth(name, blocks, 1 << 20, left_s, self.now_s)
        assert worth == 0 or 4 <= worth <= blocks

    @invariant()
    def agrees(self) -> None:
        self.choice.validate()
        assert len(self.choice.candidates("l", self.now_s)) <= 2


ChoiceMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestChoiceMachine = ChoiceMachine.TestCase
