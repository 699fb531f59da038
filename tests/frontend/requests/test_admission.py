from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.auth.accounts import Account
from services.frontend.config import LimitsConfig
from services.frontend.requests.admission import INSTANCES_NAMED, SHARE_FACTOR, Admission, Permit, Served, may_have
from shared.api_keys import KeyEntry
from shared.errors import Overloaded, Unavailable

LIMITS = LimitsConfig(requests=3, body_bytes=100, tokenising_bytes=50, tokens=1000, unasked=2, grammars=2)


def admission(refused: Counter[str] | None = None, limits: LimitsConfig = LIMITS) -> Admission:
    counts: Counter[str] = Counter() if refused is None else refused
    return Admission(limits, lambda bound: counts.update([bound]))


def key(name: str) -> Account:
    return Account(name, KeyEntry("0" * 64), 0.0)


def begun(to: Admission, body_bytes: int = 0, account: Account | None = None) -> Permit:
    place = to.reserve(account)
    place.add_bytes(body_bytes)
    place.admit()
    return place


def test_more_requests_than_the_bound_are_refused_before_their_body_is_read() -> None:
    refused: Counter[str] = Counter()
    full = admission(refused)
    places = [begun(full) for _ in range(3)]
    with pytest.raises(Overloaded, match="3 requests"):
        full.reserve()
    assert refused == {"requests": 1}
    full.release(places[0])
    full.reserve()


def test_bodies_on_their_way_keep_no_other_request_out() -> None:
    slow = admission()
    late = [slow.reserve() for _ in range(10)]
    for _ in range(3):
        begun(slow)
    with pytest.raises(Overloaded, match="3 requests"):
        late[0].admit()


def test_bytes_count_as_they_come_and_one_body_alone_may_be_larger_than_all_may_be_together() -> None:
    refused: Counter[str] = Counter()
    bodies = admission(refused)
    large = bodies.reserve()
    large.add_bytes(90)
    large.add_bytes(90)
    small = bodies.reserve()
    with pytest.raises(Overloaded, match="180 bytes"):
        small.add_bytes(1)
    bodies.release(large)
    small.add_bytes(1)
    assert refused == {"body_bytes": 1}


def test_what_waits_to_be_tokenised_is_bounded_until_it_is() -> None:
    refused: Counter[str] = Counter()
    waiting = admission(refused)
    first = begun(waiting, 40)
    second = waiting.reserve()
    second.add_bytes(40)
    with pytest.raises(Overloaded, match="40 bytes of other requests wait"):
        second.admit()
    first.add_tokens(10)
    second.admit()
    assert refused == {"tokenising_bytes": 1}


def test_what_belongs_to_a_body_counts_as_one_that_waits_to_be_tokenised() -> None:
    admission = Admission(LIMITS, lambda _bound: None)
    first, second = admission.reserve(), admission.reserve()
    for place in (first, second):
        place.add_bytes(10)
        place.admit()
    first.add_bytes(30)
    admission.validate()
    with pytest.raises(Overloaded):
        second.add_bytes(1)
    first.add_tokens(10)
    second.add_bytes(40)
    admission.validate()


def test_tokens_in_flight_are_bounded_and_a_request_alone_is_never_too_many() -> None:
    refused: Counter[str] = Counter()
    busy = admission(refused)
    first = begun(busy)
    first.add_tokens(5000)
    second = begun(busy)
    with pytest.raises(Overloaded, match="5000 tokens already; this one has 2"):
        second.add_tokens(2)
    busy.release(second)
    busy.release(first)
    begun(busy).add_tokens(2)
    assert refused == {"tokens": 1}


def test_a_request_that_has_too_many_tokens_at_least_is_refused_before_they_are_made() -> None:
    refused: Counter[str] = Counter()
    busy = admission(refused, LimitsConfig(requests=5, tokens=1000))
    begun(busy).add_tokens(900)
    second = begun(busy)
    second.check_least(100, 4, 0.0)
    for tokens, choices in ((101, 1), (100, 5)):
        with pytest.raises(Overloaded):
            second.check_least(tokens, choices, 0.0)
    assert (refused, second.taken["tokens"]) == ({"tokens": 1, "requests": 1}, 0)
    second.add_tokens(100, 4)
    busy.validate()


def test_each_choice_counts_as_a_request() -> None:
    refused: Counter[str] = Counter()
    busy = admission(refused, LimitsConfig(requests=5))
    several, another = begun(busy), begun(busy)
    with pytest.raises(Overloaded, match="2 requests are running already"):
        several.add_tokens(10, 5)
    another.add_tokens(10, 4)
    busy.validate()
    with pytest.raises(Overloaded):
        busy.reserve()
    busy.release(another)
    busy.reserve()
    assert refused == {"requests": 2}


def test_a_permit_that_a_key_has_is_not_taken_back_by_requests_that_come_before_its_tokens_count() -> None:
    refused: Counter[str] = Counter()
    shared = admission(refused, LimitsConfig(requests=20))
    greedy = key("greedy")
    mine = [begun(shared, account=greedy) for _ in range(17)]
    for _ in range(2):
        begun(shared, account=key("late"))
    for place in mine:
        place.add_tokens(1)
    assert not refused


def test_once_closed_new_requests_are_refused_and_running_ones_continue() -> None:
    ending = admission()
    there = ending.reserve()
    ending.closed = True
    with pytest.raises(Unavailable, match="about to end"):
        ending.reserve()
    there.admit()
    there.add_tokens(5)


@pytest.mark.parametrize("others", [1, 5])
def test_a_key_that_takes_all_it_can_get_keeps_no_other_key_out(others: int) -> None:
    refused: Counter[str] = Counter()
    shared = admission(refused, LimitsConfig(requests=90, tokens=9000))
    greedy = key("greedy")
    places = [begun(shared, account=greedy) for _ in range(80)]
    with pytest.raises(Overloaded, match=r"the key greedy has its share of limits\.requests: 80 of 90"):
        begun(shared, account=greedy)
    assert greedy.refused["share"] == 1
    assert refused == {"requests": 1}
    for number in range(others):
        begun(shared, account=key(f"other {number}"))
    with pytest.raises(Overloaded):
        begun(shared, account=greedy)
    begun(shared, account=key("other 0"))
    for place in places[:20]:
        shared.release(place)
    begun(shared, account=greedy)
    shared.validate()


def test_no_key_can_have_all_of_a_limit() -> None:
    limits = LimitsConfig(
        requests=100, body_bytes=900, tokenising_bytes=90, tokens=9000, unasked=90, grammars=90, images=90
    )
    for bound in ("body_bytes", "tokenising_bytes", "tokens", "unasked", "grammars", "images"):
        refused: Counter[str] = Counter()
        shared, greedy = admission(refused, limits), key("greedy")
        for _ in range(80 if bound != "tokenising_bytes" else 8):
            take(shared, bound, greedy)
        with pytest.raises(Overloaded, match=f"the key greedy has its share of limits.{bound}"):
            take(shared, bound, greedy)
        take(shared, bound, key("other"))
        assert refused == {bound: 1}


HELD = ExitStack()
"""What is never given back."""


def take(of: Admission, bound: str, account: Account) -> None:
    """A hundredth or so of what the bound allows, a tenth of bytes to be tokenised."""
    place = of.reserve(account)
    place.add_bytes(10 if bound.endswith("bytes") else 0)
    if bound != "body_bytes":
        place.admit()
    if bound == "tokens":
        place.add_tokens(100)
    elif bound == "unasked":
        place.count_unasked()
    elif bound == "grammars":
        HELD.enter_context(place.waiting("grammars"))
    elif bound == "images":
        HELD.enter_context(place.waiting("images"))


def test_a_keys_first_request_is_asked_only_whether_it_fits_however_large() -> None:
    shared = admission(limits=LimitsConfig(requests=2, body_bytes=100, tokens=1000))
    begun(shared, account=key("a")).add_tokens(10)
    begun(shared, body_bytes=100, account=key("b")).add_tokens(990)


def test_a_large_body_of_one_key_is_not_refused_halfway_because_of_its_own_first_half() -> None:
    shared = admission(limits=LimitsConfig(body_bytes=100))
    large, small = shared.reserve(key("a")), shared.reserve(key("b"))
    small.add_bytes(1)
    for _ in range(9):
        large.add_bytes(11)


class AdmissionMachine(RuleBasedStateMachine):
    """Requests at every stage, of any size, without a key or with one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = admission()
        self.accounts = [None, key("a"), key("b")]

    def some(self, at: int, *, begun: bool, tokenising: bool = False) -> Permit | None:
        those = [one for one in self.admission.permits if (one.admitted, one.tokenising) == (begun, tokenising)]
        return those[at % len(those)] if those else None

    def refusable(self, place: Permit | None, step: str, *sizes: int) -> None:
        if place is None:
            return
        try:
            getattr(place, step)(*sizes)
        except Overloaded:
            self.admission.release(place)

    @rule(at=st.integers(0, 2))
    def enter(self, at: int) -> None:
        if self.admission.totals["requests"] < LIMITS.requests and len(self.admission.permits) < 8:
            account = self.accounts[at]
            try:
                self.admission.reserve(account)
            except Overloaded:
                assert account is not None
                assert self.admission.by_key[account.name]["requests"], "its first is asked only whether it fits"

    @rule(at=st.integers(0, 7), size=st.integers(0, 120))
    def grow(self, at: int, size: int) -> None:
        self.refusable(self.some(at, begun=False), "add_bytes", size)

    @rule(at=st.integers(0, 7))
    def begin(self, at: int) -> None:
        self.refusable(self.some(at, begun=False), "admit")

    @rule(at=st.integers(0, 7), tokens=st.integers(1, 1500), choices=st.integers(1, 4))
    def weigh(self, at: int, tokens: int, choices: int) -> None:
        self.refusable(self.some(at, begun=True, tokenising=True), "add_tokens", tokens, choices)

    @rule(at=st.integers(0, 7))
    def unasked(self, at: int) -> None:
        place = self.some(at, begun=True, tokenising=True)
        if place is not None and not place.taken["unasked"]:
            self.refusable(place, "count_unasked")

    @rule(at=st.integers(0, 7))
    def leave(self, at: int) -> None:
        if self.admission.permits:
            self.admission.release(list(self.admission.permits)[at % len(self.admission.permits)])

    @invariant()
    def holds(self) -> None:
        self.admission.validate()


TestAdmission = AdmissionMachine.TestCase


# --- shares of keys

KEYS = st.integers(0, 5000)


@given(held=KEYS, other=KEYS, more=st.integers(1, 100), taken=st.integers(0, 10_000), limit=st.integers(1, 10_000))
def test_a_key_that_holds_less_is_never_refused_what_a_key_that_holds_more_may_have(
    held: int, other: int, more: int, taken: int, limit: int
) -> None:
    less, most = sorted((held, other))
    if most and may_have(most, more, taken, limit):
        assert may_have(less, more, taken, limit)


@given(st.integers(1, 10_000), st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_one_key_that_takes_all_it_can_get_leaves_a_part_to_others(limit: int, wanted: list[int]) -> None:
    held = 0
    for more in wanted * 20:
        if held + more <= limit and may_have(held, more, held, limit):
            held += more
    first = next((more for more in wanted if more <= limit), 0)
    assert held <= max(first, limit * SHARE_FACTOR / (SHARE_FACTOR + 1))


@settings(max_examples=20)
@given(st.integers(2, 20), st.integers(0, 1 << 30))
def test_keys_that_want_all_they_can_get_come_to_the_same(keys: int, seed: int) -> None:
    """The first has all it could get before the others came; requests end in any order."""
    limit, draw = 400, random.Random(seed)
    held = [0] * keys

    def ask(key: int) -> bool:
        taken = sum(held)
        allowed = taken < limit and may_have(held[key], 1, taken, limit)
        held[key] += allowed
        return allowed

    while ask(0):
        pass
    for _ in range(10 * limit):
        taken = sum(held)
        ends = draw.choices(range(keys), held)[0]  # every request is as likely to end
        held[ends] -= 1
        for key in draw.sample(range(keys), keys):
            ask(key)
        assert sum(held) <= max(taken, limit)
    assert max(held) - min(held) <= SHARE_FACTOR + 1, "a request that ends makes room for this many of one key"


def test_choices_add_up_and_each_worker_is_named_once() -> None:
    served = Served()
    served.begun(0.5)
    served.begun(0.7)
    for tokens in (3, 4):
        served.add(prompt_tokens=tokens, output_tokens=2, cached_tokens=1, instance="0a", attempts=2)
    served.add(prompt_tokens=0, output_tokens=0, cached_tokens=0, instance="", attempts=1)
    assert served == Served(7, 4, 2, 0.5, ["0a"], 5)


def test_the_workers_that_are_named_are_bounded() -> None:
    served = Served()
    for number in range(3 * INSTANCES_NAMED):
        served.add(prompt_tokens=0, output_tokens=0, cached_tokens=0, instance=f"{number}", attempts=1)
    assert len(served.instances) == INSTANCES_NAMED
