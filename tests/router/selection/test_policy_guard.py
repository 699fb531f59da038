"""A policy that fails, dawdles or chooses nonsense costs nobody a request."""

from __future__ import annotations

import math
from random import Random

import pytest

from services.router.selection.candidates import CandidateState, RoutingRequest
from services.router.selection.load import IDLE
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import BUILT_IN, Policy, explain_candidate
from services.router.selection.policy_guard import CHOICES_PER_FORGIVEN_STRIKE, PolicyFault, PolicyGuard
from shared.messages import Overlap
from tests.router.broken_policy import (
    BrokenPolicy,
    ForeignPolicy,
    GarbledPolicy,
    GreedyPolicy,
    LastPolicy,
    LeavingPolicy,
    NamingPolicy,
    NoNumberPolicy,
    OwnNoNumberPolicy,
    OwnScorePolicy,
    SenselessPolicy,
    UnspeakablePolicy,
    VectorPolicy,
    WordlessPolicy,
    WordyPolicy,
)

REQUEST = RoutingRequest(320, 16)
CANDIDATES = [CandidateState(("a", 0), Overlap(19), IDLE, 1000), CandidateState(("b", 0), Overlap(), IDLE, 1000)]


class Clock:
    """Time goes on by so much each time it is looked at."""

    def __init__(self, *steps_s: float) -> None:
        self.now_s = 0.0
        self.steps_s = list(steps_s)

    def __call__(self) -> float:
        self.now_s += self.steps_s.pop(0) if self.steps_s else 0.0
        return self.now_s


def chooser(policy: Policy, *took_s: float, strikes: int = 2) -> PolicyGuard:
    """One whose policy takes so long for its answers, and no time after that."""
    steps_s = [step_s for each in took_s for step_s in (0.0, each)]
    return PolicyGuard(policy, Random(1), clock=Clock(*steps_s), budget_s=0.005, strikes=strikes)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_those_scored_come_best_first_with_the_choice_and_who_made_it(name: str) -> None:
    policy = BUILT_IN[name]()
    choice = PolicyGuard(policy, Random(1)).choose(REQUEST, CANDIDATES)
    assert choice.policy is policy
    assert choice.fault is None
    assert choice.chosen.candidate in CANDIDATES
    scores = [each.score for each in choice.scored]
    assert scores == sorted(scores)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (BrokenPolicy(), "ZeroDivisionError: somebody's mistake"),
        (SenselessPolicy(), "TypeError"),
        (GreedyPolicy(), "AttributeError"),
        (OwnScorePolicy(), "TypeError"),
        (VectorPolicy(), "TypeError"),
        (ForeignPolicy(), "ProtocolError: the policy picked ('nowhere', 0), which is no candidate"),
        (NoNumberPolicy(), "ProtocolError: score of ('a', 0) is nan"),
        (OwnNoNumberPolicy(), "ProtocolError: score of ('a', 0) is nan"),
        (NamingPolicy(), "ProtocolError: pick returned str, not one of the scored"),
        (LeavingPolicy(), "SystemExit: 3"),
        (UnspeakablePolicy(), "UnspeakableError"),
        (GarbledPolicy(), "ValueError: ?"),
    ],
)
def test_where_the_policy_fails_kv_chooses_and_the_problem_is_told(policy: Policy, problem: str) -> None:
    asked = chooser(policy)
    for count in range(1, 31):
        choice = asked.choose(REQUEST, CANDIDATES)
        assert choice.chosen.candidate is CANDIDATES[0]
        assert isinstance(choice.policy, KvPolicy)
        assert choice.fault is not None
        assert choice.fault.kind == "failed"
        assert problem in choice.fault.problem
        said = f"{type(policy).__name__} failed ({choice.fault.problem}), kv chose: uncached 16 + "
        assert choice.reason.startswith(said)
        assert asked.failures == count
    assert asked.policy is policy, "failing is no reason to stop asking"


def test_one_that_is_slow_too_often_is_switched_off_for_good() -> None:
    policy = LastPolicy()
    asked = chooser(policy, 0.006, 0.004, 0.2, 0.05)
    told = [asked.choose(REQUEST, CANDIDATES) for _ in range(4)]
    assert [None if each.fault is None else each.fault.kind for each in told] == ["slow", None, "slow", "off"]
    assert told[3].fault is not None
    assert told[3].fault.problem.startswith("50.0 ms, the budget is 5; too slow too often")
    assert {each.chosen.candidate.id[0] for each in told} == {"b"}, "a late choice is a choice"
    assert isinstance(asked.policy, KvPolicy)
    after = asked.choose(REQUEST, CANDIDATES)
    assert after.chosen.candidate is CANDIDATES[0]
    assert after.fault is None
    assert asked.disabled
    assert after.reason.startswith("LastPolicy is off, kv chose: uncached 16 + ")


def test_failing_slowly_is_slow() -> None:
    asked = chooser(BrokenPolicy(), 0.2, 0.2, 0.2)
    told = [asked.choose(REQUEST, CANDIDATES) for _ in range(4)]
    assert [None if each.fault is None else each.fault.kind for each in told] == ["slow", "slow", "off", None]
    assert told[0].fault is not None
    assert "ZeroDivisionError: somebody's mistake" in told[0].fault.problem
    assert {each.chosen.candidate for each in told} == {CANDIDATES[0]}


def test_the_words_for_a_choice_count_towards_its_time() -> None:
    clock = Clock(0.0, 0.006, 0.0)
    asked = PolicyGuard(WordyPolicy(clock), Random(1), clock=clock, budget_s=0.005)
    choice = asked.choose(REQUEST, CANDIDATES)
    assert choice.reason == "because"
    assert choice.fault is not None
    assert choice.fault.kind == "slow"


def test_a_hiccup_now_and_then_is_forgiven() -> None:
    policy = LastPolicy()
    asked = chooser(policy, *([0.006] + [0.001] * CHOICES_PER_FORGIVEN_STRIKE) * 5)
    kinds = [asked.choose(REQUEST, CANDIDATES).fault for _ in range(5 * (CHOICES_PER_FORGIVEN_STRIKE + 1))]
    assert sum(each is not None for each in kinds) == 5
    assert asked.policy is policy


def test_without_a_clock_nothing_is_slow() -> None:
    asked = PolicyGuard(LastPolicy(), Random(1), budget_s=0.0, strikes=0)
    assert asked.choose(REQUEST, CANDIDATES).fault is None


class NeverPolicy(KvPolicy):
    """Its scores add up to what is not a number."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return math.inf if candidate.id[0] == "a" else -math.inf


def test_infinite_scores_are_scores() -> None:
    choice = PolicyGuard(NeverPolicy(), Random(1)).choose(REQUEST, CANDIDATES)
    assert (choice.fault, choice.chosen.candidate) == (None, CANDIDATES[1])


def test_a_policy_that_cannot_say_why_chooses_all_the_same_and_the_problem_is_told() -> None:
    problem = "LookupError: lost for words"
    assert explain_candidate(WordlessPolicy(), REQUEST, CANDIDATES[0]) == (f"no reason: {problem}", problem)
    asked = PolicyGuard(WordlessPolicy(), Random(1))
    choice = asked.choose(REQUEST, CANDIDATES)
    assert isinstance(choice.policy, WordlessPolicy)
    assert choice.reason == f"no reason: {problem}"
    assert choice.fault == PolicyFault("failed", f"reason: {problem}")
    assert asked.failures == 0, "the choice was its own"
    assert explain_candidate(LastPolicy(), REQUEST, CANDIDATES[0]) == ("", "")
    assert explain_candidate(KvPolicy(), REQUEST, CANDIDATES[0])[0] != ""
