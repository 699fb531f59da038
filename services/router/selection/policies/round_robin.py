"""One after another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.index.index import CandidateId
from services.router.selection.candidates import Facts, Question, Scored


class RoundRobinPolicy:
    """Takes turns in the order of the candidates' ids; who comes or goes does not disturb the others' turns."""

    def __init__(self) -> None:
        self._last: CandidateId = ("", -1)

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """All may."""
        return candidates

    def score(self, question: Question, candidate: Facts) -> float:
        """All are equal."""
        return 0.0

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """The first after the last one chosen."""
        ordered = sorted(scored, key=lambda each: each.facts.candidate)
        chosen = next((each for each in ordered if each.facts.candidate > self._last), ordered[0])
        self._last = chosen.facts.candidate
        return chosen
