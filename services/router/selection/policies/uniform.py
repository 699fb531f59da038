"""Any candidate, all equally likely; the yardstick for the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import Facts, Question, Scored


class UniformPolicy:
    """`random` in the config."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """All may."""
        return candidates

    def score(self, question: Question, candidate: Facts) -> float:
        """All are equal."""
        return 0.0

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """Any."""
        return draw.choice(scored)
