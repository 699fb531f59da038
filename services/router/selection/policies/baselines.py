"""The built-in policies that weigh no caches: least load, the better of two, turns, chance. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.index.index import CandidateId
from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate, best


class LeastLoadedPolicy:
    """Chooses the candidate with the fewest prompt tokens to compute and blocks in use, whatever it caches."""

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


class UniformPolicy:
    """Chooses any candidate, all equally likely: the policy `random` in the config."""

    def filter(self, request: RoutingRequest, candidates: Sequence[CandidateState]) -> Sequence[CandidateState]:
        """Keep all candidates."""
        return candidates

    def score(self, request: RoutingRequest, candidate: CandidateState) -> float:
        """Return 0: all candidates are equal."""
        return 0.0

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick a random candidate."""
        return draw.choice(scored)


class PowerOfTwoPolicy(LeastLoadedPolicy):
    """Chooses the less loaded of two random candidates: loads become nearly as even as with least-loaded, and requests
    never herd to one candidate (M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996)."""

    def pick(self, request: RoutingRequest, scored: Sequence[ScoredCandidate], draw: Random) -> ScoredCandidate:
        """Pick the less loaded of two."""
        return best(request, draw.sample(scored, min(2, len(scored))), draw)
