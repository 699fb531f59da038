"""Chooses the less loaded of two random candidates. Pure.

Loads become nearly as even as with least-loaded, and requests never herd to one candidate.
M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import RoutingRequest, ScoredCandidate, best
from services.router.selection.policies.least_loaded import LeastLoadedPolicy


class PowerOfTwoPolicy(LeastLoadedPolicy):
    """Weighs the load of a random sample."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick the less loaded of two."""
        return best(request, draw.sample(scored, min(2, len(scored))), draw)
