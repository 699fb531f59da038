"""Choosing a candidate: the interface of policies, and how one is found by name. Pure.

    candidates ──filter──▶ those that may ──score──▶ lower is better ──pick──▶ the choice

A policy of your own is a class with these three methods, named in the config as `module:attribute`. It is made once
per model, without arguments, and may keep state. A fourth method, `reason`, is asked for nothing but explanations, and
only of the candidates that are told: words are dear where every request scores every candidate.
`services.router.selection.policy_guard` asks it, and what happens when it fails; docs/policies.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from random import Random
from typing import Protocol, cast

from services.router.selection.candidates import Facts, Question, Scored
from services.router.selection.policies.kv import KvPolicy
from services.router.selection.policies.least_loaded import LeastLoadedPolicy
from services.router.selection.policies.power_of_two import PowerOfTwoPolicy
from services.router.selection.policies.round_robin import RoundRobinPolicy
from services.router.selection.policies.uniform import UniformPolicy
from shared.errors import ConfigError

_REASON_LIMIT = 500
_PROBLEM_LIMIT = 200
FAILURES = (Exception, SystemExit)
"""What a policy may raise, being a plug-in, without ending the router."""


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
        return "" if tell is None else _sent(str(tell(question, candidate))[:_REASON_LIMIT]), ""
    except FAILURES as wrong:  # words that fail must not fail the choice
        problem = problem_of(wrong)
        return f"no reason: {problem}", problem


def problem_of(wrong: BaseException) -> str:
    """What a plug-in raised, in words that can be sent."""
    try:
        text = f"{type(wrong).__name__}: {wrong}"
    except Exception:  # noqa: BLE001 - even its words are somebody's code
        text = type(wrong).__name__
    return _sent(text[:_PROBLEM_LIMIT])


def _sent(text: str) -> str:
    """Without what UTF-8 cannot say."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


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
    except FAILURES as wrong:  # a policy is a plug-in: its module may do anything while it is imported
        raise ConfigError(f"policy {name}: {problem_of(wrong)}") from wrong
    missing = [method for method in ("filter", "score", "pick") if not callable(getattr(made, method, None))]
    if missing or not callable(made):
        raise ConfigError(f"policy {name}: it is no class with {', '.join(missing) or 'a constructor'}")
    try:
        made()
    except FAILURES as wrong:  # the same plug-in; better now than at the first worker
        raise ConfigError(f"policy {name}: it cannot be made: {problem_of(wrong)}") from wrong
    return cast(Callable[[], Policy], made)
