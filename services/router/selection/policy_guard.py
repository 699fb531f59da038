"""Asks the policy; where it fails, the built-in `kv` chooses instead. Pure. The clock is an argument.

    trusted ──(more than `strikes` over budget)──▶ off, for good: `kv` from then on
       └─ an exception, or a choice that is none: `kv` for this question (late as well: it counts as over budget)

One over-budget answer is forgiven for every FORGIVEN within it, so a busy machine's hiccups do not add up to a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from operator import attrgetter
from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

from services.router.selection.candidates import Facts, Question, Scored
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policy import Policy, reason
from shared.errors import ProtocolError
from shared.plugin import FAILURES, problem_of

FORGIVEN = 100

_score = attrgetter("score")


class Trouble(Struct, frozen=True):
    """What was wrong with the policy's answer."""

    kind: Literal["failed", "slow", "off"]
    """failed: kv chose; or the policy did, and its `reason` failed. slow: its answer came too late, but counts. off: it
    was slow once too often."""
    problem: str


class Verdict(Struct, frozen=True):
    """A choice, and who made it."""

    policy: Policy
    scored: Sequence[Scored]
    """Best first."""
    chosen: Scored
    reason: str = ""
    """Why, in the policy's words; where that was not the policy asked for, it says so."""
    trouble: Trouble | None = None


class Chooser:
    """One model's policy, and how it has behaved."""

    def __init__(
        self,
        policy: Policy,
        draw: Random,
        *,
        name: str = "",
        clock: Callable[[], float] | None = None,
        budget_s: float = 0.005,
        strikes: int = 10,
    ) -> None:
        """`name` is what people call the policy. `clock` tells seconds; without one nothing is timed, as it should be
        for the built-in policies."""
        self._policy = policy
        self._name = name or type(policy).__name__
        self._fallback = KvPolicy()
        self.failures = 0
        """Choices that kv made, as the policy failed."""
        self._draw = draw
        self._clock = clock
        self._budget_s = budget_s
        self._strikes_allowed = strikes
        self._strikes = 0
        self._in_time = 0
        """Answers within the budget since the last that was forgiven."""

    @property
    def policy(self) -> Policy:
        """The one that is asked."""
        return self._policy

    @property
    def off(self) -> bool:
        """Whether it is asked no more."""
        return self._policy is self._fallback

    def choose(self, question: Question, facts: Sequence[Facts]) -> Verdict:
        """One of `facts`, which is not empty."""
        facts = tuple(facts)  # the policy may want to change what it is shown
        began_s = 0.0 if self._clock is None else self._clock()
        failure = ""
        try:
            verdict = _ask(self._policy, question, facts, self._draw)
            if verdict.trouble is not None:
                failure = verdict.trouble.problem
            elif self.off:
                verdict = _instead(verdict, f"{self._name} is off")
        except FAILURES as wrong:  # a policy is a plug-in: whatever it does, the request is routed
            failure = problem_of(wrong)
            self.failures += 1
            verdict = _instead(_ask(self._fallback, question, facts, self._draw), f"{self._name} failed ({failure})")
        trouble = None if self._clock is None else self._timed(self._clock() - began_s)
        if failure:
            late = trouble
            trouble = Trouble("failed", failure) if late is None else Trouble(late.kind, f"{late.problem}; {failure}")
        return verdict if trouble is verdict.trouble else msgspec.structs.replace(verdict, trouble=trouble)

    def _timed(self, took_s: float) -> Trouble | None:
        """Every change of what we think of the policy's speed."""
        if took_s <= self._budget_s:
            self._in_time += 1
            if self._in_time >= FORGIVEN:
                self._in_time = 0
                self._strikes = max(self._strikes - 1, 0)
            return None
        self._strikes += 1
        problem = f"{1000 * took_s:.1f} ms, the budget is {1000 * self._budget_s:g}"
        if self._strikes <= self._strikes_allowed:
            return Trouble("slow", problem)
        self._policy, self._clock = self._fallback, None
        return Trouble("off", f"{problem}; too slow too often: kv chooses from now on, until this router restarts")


def _instead(verdict: Verdict, why: str) -> Verdict:
    return msgspec.structs.replace(verdict, reason=f"{why}, kv chose: {verdict.reason}")


def _ask(policy: Policy, question: Question, facts: Sequence[Facts], draw: Random) -> Verdict:
    left = tuple(policy.filter(question, facts) or ()) or facts
    score = policy.score
    # A score that is no number fails here.
    scores = [float(0.0 + score(question, candidate)) for candidate in left]
    scored = tuple(map(Scored, left, scores))
    if isnan(sum(scores)):  # cheap, but infinities add up to it as well
        for each in scored:
            _check(each)
    chosen = policy.pick(question, scored, draw)
    if not isinstance(chosen, Scored):
        raise ProtocolError(f"pick returned {type(chosen).__name__}, not one of the scored")
    chosen = Scored(chosen.facts, float(0.0 + chosen.score))
    _check(chosen)
    if chosen.facts not in facts:
        raise ProtocolError(f"the policy picked {chosen.facts.candidate}, which is no candidate")
    words, problem = reason(policy, question, chosen.facts)
    trouble = Trouble("failed", f"reason: {problem}") if problem else None
    return Verdict(policy, sorted(scored, key=_score), chosen, words, trouble)


def _check(scored: Scored) -> None:
    if isnan(scored.score):
        raise ProtocolError(f"score of {scored.facts.candidate} is nan")
