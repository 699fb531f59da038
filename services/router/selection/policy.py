"""Choosing a candidate: the interface of policies, and how one is found by name. Pure.

    candidates ──filter──▶ those that may ──score──▶ lower is better ──pick──▶ the choice

A policy of your own is a class with these three methods, named in the config as `module:attribute`. It is made once
per model, without arguments, and may keep state. A fourth method, `reason`, is asked for nothing but explanations, and
only of the candidates that are told: words are dear where every request scores every candidate.
`services.router.selection.policy_guard` asks it, and what happens when it fails; docs/policies.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from services.router.selection.candidates import Facts, Question, Scored
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policies.least_loaded import LeastLoadedPolicy
from services.router.selection.policies.power_of_two import PowerOfTwoPolicy
from services.router.selection.policies.round_robin import RoundRobinPolicy
from services.router.selection.policies.uniform import UniformPolicy
from shared.errors import ConfigError
from shared.plugin import FAILURES, load_plugin, problem_of, sendable

_REASON_LIMIT = 500


class Policy(Protocol):
    """Decides among candidates. Randomness comes in as `draw`, so that the same questions get the same answers."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """Those worth scoring. None left means that all stay."""
        ...

    def score(self, question: Question, candidate: Facts) -> float:
        """What the candidate would cost; lower is better."""
        ...

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """One of `scored`, which is not empty."""
        ...


def reason(policy: Policy, question: Question, candidate: Facts) -> tuple[str, str]:
    """Why `policy` scores the candidate as it does, in words, empty where it does not say; and what went wrong."""
    try:
        tell: Callable[[Question, Facts], object] | None = getattr(policy, "reason", None)
        return "" if tell is None else sendable(str(tell(question, candidate)), _REASON_LIMIT), ""
    except FAILURES as wrong:  # words that fail must not fail the choice
        problem = problem_of(wrong)
        return f"no reason: {problem}", problem


BUILT_IN: dict[str, Callable[[], Policy]] = {
    "kv": KvPolicy,
    "round-robin": RoundRobinPolicy,
    "random": UniformPolicy,
    "least-loaded": LeastLoadedPolicy,
    "power-of-two": PowerOfTwoPolicy,
}


def load_policy(name: str) -> Callable[[], Policy]:
    """What makes the policy called `name`, built in or `module:attribute`. Raises ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    made = load_plugin("policy", name, BUILT_IN)
    missing = [method for method in ("filter", "score", "pick") if not callable(getattr(made, method, None))]
    if missing or not callable(made):
        raise ConfigError(f"policy {name}: it is no class with {', '.join(missing) or 'a constructor'}")
    try:
        made()
    except FAILURES as wrong:  # better now than at the first worker
        raise ConfigError(f"policy {name}: it cannot be made: {problem_of(wrong)}") from wrong
    return made
