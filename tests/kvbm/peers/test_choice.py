"""Which peers are asked, and how many blocks are worth reading."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvbm.peers.choice import FIRST_RATE, RATE_S, REST_MOST_S, PeerChoice
from services.kvbm.peers.messages import PeerAddress

ONE, TWO, THREE = (PeerAddress(name, "host", port) for port, name in enumerate(("one", "two", "three"), 1))


def choice(asked: int = 2) -> PeerChoice:
    made = PeerChoice(least_blocks=4, asked=asked)
    for peer in (ONE, TWO, THREE):
        made.learn(peer, ["l"])
    return made


def read(made: PeerChoice, instance: str, size_bytes: int, took_s: float = 1.0, now_s: float = 0.0) -> None:
    made.read_begins(instance, now_s)
    made.read_done(instance, size_bytes, took_s)


def test_the_fastest_peers_with_the_layout_are_asked() -> None:
    made = choice()
    read(made, "three", 10**10)
    read(made, "one", 10**6)
    assert made.candidates("l", 0.0) == [THREE, TWO]
    assert made.candidates("other", 0.0) == []
    made.learn(THREE, ["other"])
    assert made.candidates("l", 0.0) == [TWO, ONE]


def test_peers_that_are_not_among_the_fastest_have_one_place_in_turn() -> None:
    made = PeerChoice(least_blocks=4, asked=3)
    peers = [PeerAddress(f"p{number}", "host", number) for number in range(1, 7)]
    for peer in peers:
        made.learn(peer, ["l"])
        read(made, peer.instance, 10**10 - peer.port)
    seen = []
    for now_s in range(1, 9):
        *fastest, last = made.candidates("l", float(now_s))
        assert fastest == peers[:2]
        made.note_asked([*fastest, last], float(now_s))
        seen.append(last)
    assert seen == peers[2:] * 2


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
    made.read_begins("one", 100.0)
    block_bytes = int(FIRST_RATE / 100)
    assert made.worth("one", 50, block_bytes, 1.0, 100.0) == 50
    assert made.worth("one", 50, block_bytes, 0.2, 100.0) == 20
    assert made.worth("one", 50, block_bytes, 0.03, 100.0) == 0
    assert made.worth("one", 3, block_bytes, 1.0, 100.0) == 0
    assert made.worth("one", 50, block_bytes, -1.0, 100.0) == 0
    assert made.worth("unknown", 50, block_bytes, 1.0, 100.0) == 0


def test_a_peer_that_was_too_slow_is_read_again_later_and_so_is_found_to_be_fast_again() -> None:
    made = choice(asked=3)
    block_bytes, until_s = 1 << 20, 100.0 + RATE_S
    assert made.worth("one", 50, block_bytes, 1.0, 100.0) == 50
    read(made, "one", block_bytes, now_s=100.0)  # it stood still for most of the read
    assert made.worth("one", 50, block_bytes, 1.0, until_s - 0.1) == 0
    assert made.rates(["l"], until_s - 0.1)["one"] == block_bytes
    assert made.worth("one", 3, block_bytes, 1.0, until_s) == 0
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 4
    assert made.rates(["l"], until_s)["one"] == FIRST_RATE, (
        "routers send prompts there, or there would be nothing to read"
    )
    made.read_begins("one", until_s)
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 0
    assert made.rates(["l"], until_s)["one"] == block_bytes
    made.read_done("one", 4 * block_bytes, 0.01)
    assert made.worth("one", 50, block_bytes, 1.0, until_s) == 50


def test_a_read_that_was_late_is_measured_and_its_peer_rests_all_the_same() -> None:
    made = choice()
    made.failed("one", 0.0)
    made.read_begins("one", 0.0)
    made.measure("one", 10**6, 1.0)
    assert made.known["one"].rate == 1e6
    made.measure("one", 0, 1.0)
    assert made.known["one"].rate == 1e6, "nothing came: that says nothing of the rate"
    made.failed("one", 100.0)
    assert ONE not in made.candidates("l", 101.9)


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
    read(made, "one", 10**10)
    assert made.rates(["l"], 0.0)["one"] == 1e10
    read(made, "one", 10**9)
    assert made.rates(["l"], 0.0)["one"] == 1e10 + 0.3 * (1e9 - 1e10)


def test_rates_are_those_of_the_fastest_peers_of_each_layout() -> None:
    made = choice()
    read(made, "three", 10**10)
    read(made, "one", 10**6)
    assert made.rates(["l"], 0.0) == {"three": 1e10, "two": FIRST_RATE}
    made.failed("three", 5.0)
    assert made.rates(["l"], 5.5) == {"two": FIRST_RATE, "one": 1e6}
    made.learn(TWO, ["other"])
    assert made.rates(["l"], 5.5) == {"one": 1e6}
    assert made.rates(["l", "other"], 5.5) == {"one": 1e6, "two": FIRST_RATE}
    assert made.rates([], 5.5) == {}


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

    @rule(name=names, size_bytes=st.integers(0, 10**12), took_s=st.floats(0, 100), whole=st.booleans())
    def read(self, name: str, size_bytes: int, took_s: float, whole: bool) -> None:
        self.choice.read_begins(name, self.now_s)
        if whole:
            self.choice.read_done(name, size_bytes, took_s)
        else:
            self.choice.measure(name, size_bytes, took_s)

    @rule(name=names)
    def becomes_worth_it(self, name: str) -> None:
        """Whatever was measured, after a while a peer is worth a read, and routers send prompts there."""
        later_s = self.now_s + RATE_S
        assert name not in self.choice.known or self.choice.worth(name, 100, 1 << 20, 0.25, later_s) >= 4
        assert all(rate >= FIRST_RATE for rate in self.choice.rates(["l", "m"], later_s).values())

    @rule(name=names, blocks=st.integers(0, 100), left_s=st.floats(-1, 10))
    def ask(self, name: str, blocks: int, left_s: float) -> None:
        worth = self.choice.worth(name, blocks, 1 << 20, left_s, self.now_s)
        assert worth == 0 or 4 <= worth <= blocks

    @invariant()
    def agrees(self) -> None:
        self.choice.validate()
        asked = self.choice.candidates("l", self.now_s)
        assert len(asked) <= 2
        self.choice.note_asked(asked, self.now_s)


ChoiceMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestChoiceMachine = ChoiceMachine.TestCase
