"""Choosing a candidate: the interface of policies, and how one is found by name. Pure.

    candidates ──filter──▶ those that may ──score──▶ lower is better ──pick──▶ the choice

A policy of your own is a class with these three methods, named in the config as `module:attribute`. It is made once
per model, without arguments, and may keep state. A fourth method, `reason`, is asked for nothing but explanations, and
only of the candidates that are told: words are dear where every request scores every candidate.
`services.router.chooser` asks it, and what happens when it fails; docs/policies.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from random import Random
from typing import Protocol, cast

from services.router.policies.kv import KvPolicy
from services.router.policies.least_loaded import LeastLoadedPolicy
from services.router.policies.power_of_two import PowerOfTwoPolicy
from services.router.policies.round_robin import RoundRobinPolicy
from services.router.policies.uniform import UniformPolicy
from services.router.question import Facts, Question, Scored
from shared.errors import ConfigError

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


def reason(policy: Policy, question: Question, candidate: Facts) -> str:
    """Why `policy` scores the candidate as it does, in words; empty where it does not say."""
    try:
        tell: Callable[[Question, Facts], object] | None = getattr(policy, "reason", None)
        return "" if tell is None else str(tell(question, candidate))[:_REASON_LIMIT]
    except Exception as wrong:  # noqa: BLE001 - a policy is a plug-in: words that fail must not fail the choice
        return f"no reason: {type(wrong).__name__}: {wrong}"[:_REASON_LIMIT]


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
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"policy {name}: not one of {', '.join(BUILT_IN)} and not module:attribute")
    try:
        made = getattr(import_module(module), attribute)
    except Exception as wrong:  # a policy is a plug-in: its module may do anything while it is imported
        raise ConfigError(f"policy {name}: {type(wrong).__name__}: {wrong}") from wrong
    missing = [method for method in ("filter", "score", "pick") if not callable(getattr(made, method, None))]
    if missing or not callable(made):
        raise ConfigError(f"policy {name}: it is no class with {', '.join(missing) or 'a constructor'}")
    try:
        made()
    except Exception as wrong:  # the same plug-in; better now than at the first worker
        raise ConfigError(f"policy {name}: it cannot be made: {type(wrong).__name__}: {wrong}") from wrong
    return cast(Callable[[], Policy], made)
