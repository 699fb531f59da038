"""A policy of somebody's own that does not work."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.question import Facts, Question, Scored


class BrokenPolicy:
    """Fails at the last moment."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        return candidates

    def score(self, question: Question, candidate: Facts) -> Scored:
        return Scored(candidate, 0.0, "")

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        raise ZeroDivisionError("somebody's mistake")
