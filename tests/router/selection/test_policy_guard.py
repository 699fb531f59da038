"""A policy that fails, is slow or chooses an invalid candidate never costs a request."""

from __future__ import annotations

import math
from random import Random

import pytest

from services.router.config import RouterConfig
from services.router.selection.candidates import CandidateState, RoutingRequest
from services.router.selection.load import IDLE
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import BUILT_IN, Policy, explain_candidate
from services.router.selection.policy_guard import CHOICES_PER_FORGIVEN_STRIKE, PolicyFault, PolicyGuard
from shared.messages.select import Overlap
from tests.router.broken_policy import (
    ArrayScorePolicy,
    BrokenPolicy,
    ExitingPolicy,
    FailingReasonPolicy,
    IdPickPolicy,
    LastPolicy,
    MutatingPolicy,
    NanPickPolicy,
    NanScorePolicy,
    SlowReasonPolicy,
    SurrogateErrorPolicy,
    TextPickPolicy,
    TextScorePolicy,
    UnknownCandidatePolicy,
    UnprintableErrorPolicy,
)

REQUEST = RoutingRequest(320, 16)
CANDIDATES = [CandidateState(("a", 0), Overlap(19), IDLE, 1000), CandidateState(("b", 0), Overlap(), IDLE, 1000)]


class SteppingClock:
    """A clock that advances by the next of these times at each call."""

    def __init__(self, *steps_s: float) -> None:
        self.now_s = 0.0
        self.steps_s = list(steps_s)

    def __call__(self) -> float:
        self.now_s += self.steps_s.pop(0) if self.steps_s else 0.0
        return self.now_s


def guard(policy: Policy, *took_s: float, strikes: int = 2) -> PolicyGuard:
    """Guard a policy whose choices take these times, and no time after that."""
    steps_s = [step_s for each in took_s for step_s in (0.0, each)]
    config = RouterConfig(policy=type(policy).__name__, policy_budget_ms=5.0, policy_strikes=strikes)
    return PolicyGuard(policy, Random(1), config, SteppingClock(*steps_s))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_choice_has_the_scored_candidates_best_first_and_the_policy_that_made_it(name: str) -> None:
    policy = BUILT_IN[name]()
    choice = PolicyGuard(policy, Random(1), RouterConfig()).choose(REQUEST, CANDIDATES)
    assert choice.policy is policy
    assert choice.fault is None
    assert choice.chosen.candidate in CANDIDATES
    scores = [each.score for each in choice.scored]
    assert scores == sorted(scores)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (BrokenPolicy(), "ZeroDivisionError: a mistake in a policy"),
        (TextScorePolicy(), "TypeError"),
        (MutatingPolicy(), "AttributeError"),
        (TextPickPolicy(), "TypeError"),
        (ArrayScorePolicy(), "TypeError"),
        (UnknownCandidatePolicy(), "ProtocolError: the policy picked ('nowhere', 0), which is not a candidate"),
        (NanScorePolicy(), "ProtocolError: score of ('a', 0) is nan"),
        (NanPickPolicy(), "ProtocolError: score of ('a', 0) is nan"),
        (IdPickPolicy(), "ProtocolError: pick returned str instead of one of `scored`"),
        (ExitingPolicy(), "SystemExit: 3"),
        (UnprintableErrorPolicy(), "UnprintableError"),
        (SurrogateErrorPolicy(), "ValueError: ?"),
    ],
)
def test_if_the_policy_fails_kv_chooses_and_the_problem_is_reported(policy: Policy, problem: str) -> None:
    guarded = guard(policy)
    for count in range(1, 31):
        choice = guarded.choose(REQUEST, CANDIDATES)
        assert choice.chosen.candidate is CANDIDATES[0]
        assert isinstance(choice.policy, KvPolicy)
        assert choice.fault is not None
        assert choice.fault.kind == "failed"
        assert problem in choice.fault.problem
        said = f"{type(policy).__name__} failed ({choice.fault.problem}), kv chose: uncached 16 + "
        assert choice.reason.startswith(said)
        assert guarded.failures == count
    assert guarded.policy is policy, "failing is no reason to stop asking"


def test_a_policy_that_is_slow_too_often_is_disabled_for_good() -> None:
    policy = LastPolicy()
    guarded = guard(policy, 0.006, 0.004, 0.2, 0.05)
    choices = [guarded.choose(REQUEST, CANDIDATES) for _ in range(4)]
    assert [None if each.fault is None else each.fault.kind for each in choices] == ["slow", None, "slow", "off"]
    assert choices[3].fault is not None
    assert choices[3].fault.problem.startswith("it took 50.0 ms, the budget is 5 ms; too slow too often")
    assert {each.chosen.candidate.id[0] for each in choices} == {"b"}, "a late choice is a choice"
    assert isinstance(guarded.policy, KvPolicy)
    after = guarded.choose(REQUEST, CANDIDATES)
    assert after.chosen.candidate is CANDIDATES[0]
    assert after.fault is None
    assert guarded.disabled
    assert after.reason.startswith("LastPolicy is off, kv chose: uncached 16 + ")


def test_a_slow_failure_counts_as_slow() -> None:
    guarded = guard(BrokenPolicy(), 0.2, 0.2, 0.2)
    choices = [guarded.choose(REQUEST, CANDIDATES) for _ in range(4)]
    assert [None if each.fault is None else each.fault.kind for each in choices] == ["slow", "slow", "off", None]
    assert choices[0].fault is not None
    assert "ZeroDivisionError: a mistake in a policy" in choices[0].fault.problem
    assert {each.chosen.candidate for each in choices} == {CANDIDATES[0]}


def test_the_time_of_the_reason_counts_towards_the_budget() -> None:
    clock = SteppingClock(0.0, 0.006, 0.0)
    guarded = PolicyGuard(SlowReasonPolicy(clock), Random(1), RouterConfig(policy_budget_ms=5.0), clock)
    choice = guarded.choose(REQUEST, CANDIDATES)
    assert choice.reason == "because"
    assert choice.fault is not None
    assert choice.fault.kind == "slow"


def test_an_occasional_slow_choice_is_forgiven() -> None:
    policy = LastPolicy()
    guarded = guard(policy, *([0.006] + [0.001] * CHOICES_PER_FORGIVEN_STRIKE) * 5)
    kinds = [guarded.choose(REQUEST, CANDIDATES).fault for _ in range(5 * (CHOICES_PER_FORGIVEN_STRIKE + 1))]
    assert sum(each is not None for each in kinds) == 5
    assert guarded.policy is policy


def test_without_a_clock_no_choice_is_slow() -> None:
    guarded = PolicyGuard(LastPolicy(), Random(1), RouterConfig(policy_budget_ms=0.0, policy_strikes=0))
    assert guarded.choose(REQUEST, CANDIDATES).fault is None


class InfiniteScorePolicy(KvPolicy):
    """Returns infinite scores, whose sum is NaN."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return math.inf if candidate.id[0] == "a" else -math.inf


def test_infinite_scores_are_scores() -> None:
    choice = PolicyGuard(InfiniteScorePolicy(), Random(1), RouterConfig()).choose(REQUEST, CANDIDATES)
    assert (choice.fault, choice.chosen.candidate) == (None, CANDIDATES[1])


def test_a_policy_whose_reason_fails_still_chooses_and_the_problem_is_reported() -> None:
    problem = "LookupError: lost for words"
    assert explain_candidate(FailingReasonPolicy(), REQUEST, CANDIDATES[0]) == (f"no reason: {problem}", problem)
    guarded = PolicyGuard(FailingReasonPolicy(), Random(1), RouterConfig())
    choice = guarded.choose(REQUEST, CANDIDATES)
    assert isinstance(choice.policy, FailingReasonPolicy)
    assert choice.reason == f"no reason: {problem}"
    assert choice.fault == PolicyFault("failed", f"reason: {problem}")
    assert guarded.failures == 0, "the choice was its own"
    assert explain_candidate(LastPolicy(), REQUEST, CANDIDATES[0]) == ("", "")
    assert explain_candidate(KvPolicy(), REQUEST, CANDIDATES[0])[0] != ""
