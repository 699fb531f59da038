"""The less loaded of two drawn at random: nearly as even as the least loaded, and it never herds. Pure.

M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import Facts, Question, Scored, best
from services.router.selection.policies.least_loaded import tokens_in_hand


class PowerOfTwoPolicy:
    """Load, of a sample."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """All may."""
        return candidates

    def score(self, question: Question, candidate: Facts) -> float:
        """Tokens in hand."""
        return tokens_in_hand(question, candidate)

    def reason(self, question: Question, candidate: Facts) -> str:
        """The same in words."""
        return f"{tokens_in_hand(question, candidate)} tokens in hand"

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """The better of two."""
        return best(question, draw.sample(scored, min(2, len(scored))), draw)
