"""Chooses the candidate with the fewest prompt tokens to compute and blocks in use, whatever it caches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best


class LeastLoadedPolicy:
    """Weighs load alone."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Keep all candidates."""
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return the queued prompt tokens plus the tokens of the blocks in use."""
        return candidate.load.queued_tokens + candidate.load.active_blocks * request.block_size

    def reason(self, request: RoutingRequest, candidate: CandidateState) -> str:
        """Return the tokens of its load as text."""
        return f"{self.score(request, candidate):.0f} tokens queued or in use"

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick the least loaded candidate."""
        return best(request, scored, draw)
