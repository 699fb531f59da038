"""Chooses any candidate, all equally likely; the baseline for the other policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate


class UniformPolicy:
    """The policy `random` in the config."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Keep all candidates."""
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return 0: all candidates are equal."""
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick a random candidate."""
        return draw.choice(scored)
