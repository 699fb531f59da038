"""A routing policy that shows what it gets of a request."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best


class ShownPolicy:
    """Chooses the first candidate; its reason has the request's session and priority."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        return best(request, scored, draw)

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        return f"session {request.session}, priority {request.priority}"
