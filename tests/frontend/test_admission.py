from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.admission import Admission, Place
from services.frontend.config import LimitsConfig
from shared.errors import Overloaded, Unavailable

LIMITS = LimitsConfig(requests=3, body_bytes=100, tokenising_bytes=50, tokens=1000)


def admission(refused: Counter[str] | None = None, limits: LimitsConfig = LIMITS) -> Admission:
    counts: Counter[str] = Counter() if refused is None else refused
    return Admission(limits, lambda bound: counts.update([bound]))


def begun(to: Admission, body_bytes: int = 0) -> Place:
    place = to.enter()
    place.grow(body_bytes)
    place.begin()
    return place


def test_more_requests_than_the_bound_are_refused_before_their_body_is_read() -> None:
    refused: Counter[str] = Counter()
    full = admission(refused)
    places = [begun(full) for _ in range(3)]
    with pytest.raises(Overloaded, match="3 requests"):
        full.enter()
    assert refused == {"requests": 1}
    full.leave(places[0])
    full.enter()


def test_bodies_on_their_way_keep_nobody_out() -> None:
    slow = admission()
    late = [slow.enter() for _ in range(10)]
    for _ in range(3):
        begun(slow)
    with pytest.raises(Overloaded, match="3 requests"):
        late[0].begin()


def test_bytes_count_as_they_come_and_one_body_alone_may_be_larger_than_all_may_be_together() -> None:
    refused: Counter[str] = Counter()
    bodies = admission(refused)
    large = bodies.enter()
    large.grow(90)
    large.grow(90)
    small = bodies.enter()
    with pytest.raises(Overloaded, match="180 bytes"):
        small.grow(1)
    bodies.leave(large)
    small.grow(1)
    assert refused == {"body_bytes": 1}


def test_what_waits_to_be_tokenised_is_bounded_until_it_is() -> None:
    refused: Counter[str] = Counter()
    waiting = admission(refused)
    first = begun(waiting, 40)
    second = waiting.enter()
    second.grow(40)
    with pytest.raises(Overloaded, match="40 bytes of other requests wait"):
        second.begin()
    first.weigh(10)
    second.begin()
    assert refused == {"tokenising_bytes": 1}


def test_tokens_in_flight_are_bounded_and_a_request_alone_is_never_too_many() -> None:
    refused: Counter[str] = Counter()
    busy = admission(refused)
    first = begun(busy)
    first.weigh(5000)
    second = begun(busy)
    with pytest.raises(Overloaded, match="5000 tokens already; this one has 2"):
        second.weigh(2)
    busy.leave(second)
    busy.leave(first)
    begun(busy).weigh(2)
    assert refused == {"tokens": 1}


def test_once_closed_nobody_enters_and_who_is_there_goes_on() -> None:
    ending = admission()
    there = ending.enter()
    ending.closed = True
    with pytest.raises(Unavailable, match="about to end"):
        ending.enter()
    there.begin()
    there.weigh(5)


class AdmissionMachine(RuleBasedStateMachine):
    """Requests at every stage, of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = admission()

    def some(self, at: int, *, begun: bool, tokenising: bool = False) -> Place | None:
        those = [one for one in self.admission.places if (one.begun, one.tokenising) == (begun, tokenising)]
        return those[at % len(those)] if those else None

    def refusable(self, place: Place | None, step: str, size: int = 0) -> None:
        if place is None:
            return
        try:
            place.begin() if step == "begin" else getattr(place, step)(size)
        except Overloaded:
            self.admission.leave(place)

    @rule()
    def enter(self) -> None:
        if self.admission.begun < LIMITS.requests and len(self.admission.places) < 8:
            self.admission.enter()

    @rule(at=st.integers(0, 7), size=st.integers(0, 120))
    def grow(self, at: int, size: int) -> None:
        self.refusable(self.some(at, begun=False), "grow", size)

    @rule(at=st.integers(0, 7))
    def begin(self, at: int) -> None:
        self.refusable(self.some(at, begun=False), "begin")

    @rule(at=st.integers(0, 7), tokens=st.integers(1, 1500))
    def weigh(self, at: int, tokens: int) -> None:
        self.refusable(self.some(at, begun=True, tokenising=True), "weigh", tokens)

    @rule(at=st.integers(0, 7))
    def leave(self, at: int) -> None:
        if self.admission.places:
            self.admission.leave(list(self.admission.places)[at % len(self.admission.places)])

    @invariant()
    def holds(self) -> None:
        self.admission.validate()


TestAdmission = AdmissionMachine.TestCase
