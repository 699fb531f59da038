"""The candidate with the least prompt tokens to compute and blocks in use, whatever it caches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.selection.candidates import Facts, Question, Scored, best


def tokens_in_hand(question: Question, candidate: Facts) -> int:
    """Queued prompt tokens, and tokens of the blocks in use."""
    return candidate.load.queued_tokens + candidate.load.active_blocks * question.block_size


class LeastLoadedPolicy:
    """Load alone."""

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
        """The least loaded."""
        return best(question, scored, draw)
