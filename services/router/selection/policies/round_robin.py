"""Chooses one candidate after another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.index.index import CandidateId
from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate


class RoundRobinPolicy:
    """Takes turns in the order of the candidates' ids; a candidate that joins or leaves does not change the others'
    order. The two workers of a pair and those of whole requests have turns of their own."""

    def __init__(self) -> None:
        self._last: dict[str, CandidateId] = {}
        """Part of a request → the candidate chosen last for it."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Keep all candidates."""
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return 0: all candidates are equal."""
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick the first candidate after the last one chosen."""
        ordered = sorted(scored, key=lambda each: each.candidate.id)
        last = self._last.get(request.part, ("", -1))
        chosen = next((each for each in ordered if each.candidate.id > last), ordered[0])
        self._last[request.part] = chosen.candidate.id
        return chosen
