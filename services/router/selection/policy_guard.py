"""Calls the policy; if it fails, the built-in `kv` chooses instead. Pure. The clock is an argument.

    trusted ──(more than `strikes` choices over budget)──▶ disabled for good: `kv` chooses from then on
       └─ an exception or an invalid choice: `kv` chooses for this request (if late, it counts as over budget too)

One choice over budget is forgiven for every CHOICES_PER_FORGIVEN_STRIKE within it, so that a busy machine's delays do
not add up and disable the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from operator import attrgetter
from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

from services.router.config import RouterConfig
from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import Policy, explain_candidate
from shared.errors import ProtocolError
from shared.plugin import FAILURES, problem_of

CHOICES_PER_FORGIVEN_STRIKE = 100

_score = attrgetter("score")


class PolicyFault(Struct, frozen=True):
    """What was wrong with a choice of the policy."""

    kind: Literal["failed", "slow", "off"]
    """"failed": kv chose instead; or the policy chose and its `reason` failed. "slow": the choice came too late, but
    counts. "off": the policy was slow once too often and is disabled."""
    problem: str


class PolicyChoice(Struct, frozen=True):
    """A choice and the policy that made it."""

    policy: Policy
    scored: Sequence[ScoredCandidate]
    """Scored candidates, best first."""
    chosen: ScoredCandidate
    reason: str = ""
    """The reason in the policy's words. If another policy was asked first, the reason says so."""
    fault: PolicyFault | None = None

    def with_reason(self, more: str) -> PolicyChoice:
        """Return the choice with one more reason."""
        return msgspec.structs.replace(self, reason=f"{self.reason}; {more}")


class PolicyGuard:
    """One model's policy, and a record of its failures."""

    def __init__(
        self,
        policy: Policy,
        draw: Random,
        config: RouterConfig,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Guard the policy that `config` names, within its limits. `clock` returns seconds; without it nothing is
        timed, as is right for the built-in policies."""
        self.policy = policy
        """The policy that is called."""
        self._name = config.policy
        self._fallback = KvPolicy()
        self.failures = 0
        """Number of choices that kv made because the policy failed."""
        self._draw = draw
        self._clock = clock
        self._budget_s = config.policy_budget_ms / 1000
        self._strikes_allowed = config.policy_strikes
        self._strikes = 0
        self._in_time = 0
        """Number of choices within the budget since the last one that was forgiven."""

    @property
    def disabled(self) -> bool:
        """Whether the policy is disabled for good."""
        return self.policy is self._fallback

    def choose(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> PolicyChoice:
        """Choose one of `candidates`, which is not empty."""
        candidates = tuple(candidates)  # the policy may try to change the sequence that it gets
        began_s = 0.0 if self._clock is None else self._clock()
        failure = ""
        try:
            choice = _ask_policy(self.policy, request, candidates, self._draw)
            if choice.fault is not None:
                failure = choice.fault.problem
            elif self.disabled:
                choice = _by_fallback(choice, f"{self._name} is off")
        except FAILURES as wrong:  # a policy is a plug-in: whatever it raises, the request is routed
            failure = problem_of(wrong)
            self.failures += 1
            choice = _by_fallback(
                _ask_policy(self._fallback, request, candidates, self._draw), f"{self._name} failed ({failure})"
            )
        fault = None if self._clock is None else self._count_time(self._clock() - began_s)
        if failure:
            late = fault
            fault = (
                PolicyFault("failed", failure) if late is None else PolicyFault(late.kind, f"{late.problem}; {failure}")
            )
        return choice if fault is choice.fault else msgspec.structs.replace(choice, fault=fault)

    def _count_time(self, took_s: float) -> PolicyFault | None:
        """Record the time of a choice; return a fault if it was over budget."""
        if took_s <= self._budget_s:
            self._in_time += 1
            if self._in_time >= CHOICES_PER_FORGIVEN_STRIKE:
                self._in_time = 0
                self._strikes = max(self._strikes - 1, 0)
            return None
        self._strikes += 1
        problem = f"it took {1000 * took_s:.1f} ms, the budget is {1000 * self._budget_s:g} ms"
        if self._strikes <= self._strikes_allowed:
            return PolicyFault("slow", problem)
        self.policy, self._clock = self._fallback, None
        return PolicyFault("off", f"{problem}; too slow too often, so kv chooses until this router restarts")


def worst_fault(*faults: PolicyFault | None) -> PolicyFault | None:
    """Return the fault to report of the choices for one request: that the policy was disabled, else the first."""
    return max(filter(None, faults), key=lambda fault: fault.kind == "off", default=None)


def _by_fallback(choice: PolicyChoice, why: str) -> PolicyChoice:
    return msgspec.structs.replace(choice, reason=f"{why}, kv chose: {choice.reason}")


def _ask_policy(
    policy: Policy, request: RoutingRequest, candidates: Sequence[CandidateState], draw: Random
) -> PolicyChoice:
    left = tuple(policy.filter(request, candidates) or ()) or candidates
    score = policy.score
    # A score that is not a number fails here.
    scores = [float(0.0 + score(request, candidate)) for candidate in left]
    scored = tuple(map(ScoredCandidate, left, scores))
    if isnan(sum(scores)):  # cheap, but infinities may add up to NaN too
        for each in scored:
            _check_score(each)
    chosen = policy.pick(request, scored, draw)
    if not isinstance(chosen, ScoredCandidate):
        raise ProtocolError(f"pick returned {type(chosen).__name__} instead of one of `scored`")
    chosen = ScoredCandidate(chosen.candidate, float(0.0 + chosen.score))
    _check_score(chosen)
    if chosen.candidate not in candidates:
        raise ProtocolError(f"the policy picked {chosen.candidate.id}, which is not a candidate")
    words, problem = explain_candidate(policy, request, chosen.candidate)
    fault = PolicyFault("failed", f"reason: {problem}") if problem else None
    return PolicyChoice(policy, sorted(scored, key=_score), chosen, words, fault)


def _check_score(scored: ScoredCandidate) -> None:
    if isnan(scored.score):
        raise ProtocolError(f"score of {scored.candidate.id} is nan")
