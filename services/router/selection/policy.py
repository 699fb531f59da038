"""The interface of routing policies, and how a policy is found by name. Pure.

    candidates ──filter──▶ those worth scoring ──score──▶ lower is better ──pick──▶ the choice

A policy of your own is a class with these three methods, named in the config as `module:attribute`. It is created once
per model, without arguments, and may keep state. A fourth method, `reason`, is optional. It is called only for
explanations, and only for the candidates that are shown: text is too slow to make for every candidate of every request.
`services.router.selection.policy_guard` calls the policy and handles its failures; docs/policies.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate
from services.router.selection.policies.baselines import (
    LeastLoadedPolicy,
    PowerOfTwoPolicy,
    RoundRobinPolicy,
    UniformPolicy,
)
from services.router.selection.policies.kv import KvPolicy
from shared.errors import ConfigError
from shared.plugin import FAILURES, load_plugin, problem_of, sendable

_REASON_LIMIT = 500


class Policy(Protocol):
    """Decides among candidates. Random numbers come from `draw`, so that the same requests get the same answers."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Return the candidates worth scoring. If the result is empty, all stay."""
        ...

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return the cost of choosing the candidate; lower is better."""
        ...

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Return one of `scored`, which is not empty."""
        ...


def explain_candidate(policy: Policy, request: RoutingRequest, candidate: CandidateState) -> tuple[str, str]:
    """Return (the policy's reason for its score of the candidate, or "" if it gives none; the problem if `reason`
    failed)."""
    try:
        explain: Callable[[RoutingRequest, CandidateState], object] | None = getattr(policy, "reason", None)
        return "" if explain is None else sendable(str(explain(request, candidate)), _REASON_LIMIT), ""
    except FAILURES as wrong:  # a reason that fails must not fail the choice
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
    """Return the factory of the policy `name`, which is built in or `module:attribute`. Raise ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    made = load_plugin("policy", name, BUILT_IN)
    missing = [method for method in ("filter", "score", "pick") if not callable(getattr(made, method, None))]
    if missing or not callable(made):
        raise ConfigError(f"policy {name}: it must be a class with {', '.join(missing) or 'a constructor'}")
    try:
        made()
    except FAILURES as wrong:  # better now than when the first worker comes
        raise ConfigError(f"policy {name}: its constructor failed: {problem_of(wrong)}") from wrong
    return made
