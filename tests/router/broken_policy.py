"""Policies of somebody's own that do not work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best


class BrokenPolicy:
    """Fails at the last moment."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        raise ZeroDivisionError("somebody's mistake")


class SenselessPolicy(BrokenPolicy):
    """Its scores are no numbers."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return "best"  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class NoNumberPolicy(SenselessPolicy):
    """Divides nothing by nothing; and picks as `kv` does, whom that leaves without a lowest score."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return math.nan if candidate.id[0] == "a" else 1.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return best(request, scored, draw)


class OwnNoNumberPolicy(BrokenPolicy):
    """Its own choice has a score that is not a number."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return ScoredCandidate(scored[0].candidate, math.nan)


class NamingPolicy(BrokenPolicy):
    """Picks a name instead of one of the scored."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0].candidate.id[0]  # type: ignore[return-value]


class LeavingPolicy(BrokenPolicy):
    """Ends the process, were it asked."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise SystemExit(3)


class UnspeakableError(Exception):
    """Has no words."""

    def __str__(self) -> str:
        raise self


class UnspeakablePolicy(BrokenPolicy):
    """Raises what cannot even be printed."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise UnspeakableError


class GarbledPolicy(BrokenPolicy):
    """Raises what no message carries."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        raise ValueError("\udcff")


class NumpyPolicy(BrokenPolicy):
    """Its scores are numbers, of a kind that no message carries."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return np.float32(1.0)  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class NeedyPolicy(BrokenPolicy):
    """Wants what nobody gives it."""

    def __init__(self, weight: float) -> None:
        self.weight = weight


class WordlessPolicy(BrokenPolicy):
    """Chooses well, and cannot say why."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        raise LookupError("lost for words")


class ForeignPolicy(BrokenPolicy):
    """Picks one that it has made up."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        facts = scored[0].candidate
        return ScoredCandidate(CandidateState(("nowhere", 0), facts.overlap, facts.load, facts.total_blocks), 0.0)


class LastPolicy(BrokenPolicy):
    """Chooses the last by id: what `kv` would not do."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return -float(ord(candidate.id[0][0]))

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return min(scored, key=lambda each: each.score)


class GreedyPolicy(BrokenPolicy):
    """Takes what it was shown away with it."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        candidates.clear()  # type: ignore[attr-defined]
        return []


class OwnScorePolicy(BrokenPolicy):
    """Picks a candidate under a score of its own making."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return ScoredCandidate(scored[0].candidate, "best")  # type: ignore[arg-type]


class VectorPolicy(BrokenPolicy):
    """Its scores are numbers, but many."""

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return np.zeros(3)  # type: ignore[return-value]

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return scored[0]


class WordyPolicy(WordlessPolicy):
    """Takes its time to say why, as its clock sees it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        self.clock()
        return "because"
