"""Routing policies that fail in different ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best


class BrokenPolicy:
    """Raises in `pick`."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        raise ZeroDivisionError("a mistake in a policy")


class TextScorePolicy(BrokenPolicy):
    """Returns scores that are not numbers."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return "best"  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class NanScorePolicy(TextScorePolicy):
    """Returns NaN as a score and picks as `kv` does, so there is no lowest score."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return math.nan if candidate.id[0] == "a" else 1.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return best(request, scored, draw)


class NanPickPolicy(BrokenPolicy):
    """Picks a candidate under a score of NaN."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return ScoredCandidate(scored[0].candidate, math.nan)


class IdPickPolicy(BrokenPolicy):
    """Picks an id instead of one of `scored`."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0].candidate.id[0]  # type: ignore[return-value]


class ExitingPolicy(BrokenPolicy):
    """Raises SystemExit."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise SystemExit(3)


class UnprintableError(Exception):
    """Raises itself when it is printed."""

    def __str__(self) -> str:
        raise self


class UnprintableErrorPolicy(BrokenPolicy):
    """Raises an exception that cannot be printed."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise UnprintableError


class SurrogateErrorPolicy(BrokenPolicy):
    """Raises a text that no message can carry."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise ValueError("\udcff")


class NumpyScorePolicy(BrokenPolicy):
    """Returns scores of a number type that no message can carry."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return np.float32(1.0)  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class ConstructorArgumentPolicy(BrokenPolicy):
    """Has a constructor with an argument, which the router does not pass."""

    def __init__(self, weight: float) -> None:
        self.weight = weight


class FailingReasonPolicy(BrokenPolicy):
    """Chooses well, but its `reason` fails."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        raise LookupError("lost for words")


class UnknownCandidatePolicy(BrokenPolicy):
    """Picks a candidate that does not exist."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        facts = scored[0].candidate
        return ScoredCandidate(CandidateState(("nowhere", 0), facts.overlap, facts.load, facts.total_blocks), 0.0)


class LastPolicy(BrokenPolicy):
    """Chooses the last candidate by id, unlike `kv`."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return -float(ord(candidate.id[0][0]))

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return min(scored, key=lambda each: each.score)


class MutatingPolicy(BrokenPolicy):
    """Tries to clear the sequence of candidates that it gets."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        candidates.clear()  # type: ignore[attr-defined]
        return []


class TextPickPolicy(BrokenPolicy):
    """Picks a candidate under a score that is not a number."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return ScoredCandidate(scored[0].candidate, "best")  # type: ignore[arg-type]


class ArrayScorePolicy(BrokenPolicy):
    """Returns arrays as scores."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return np.zeros(3)  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class SlowReasonPolicy(FailingReasonPolicy):
    """Advances the clock in `reason`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        self.clock()
        return "because"
