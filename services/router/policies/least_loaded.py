"""The candidate with the least prompt tokens to compute and blocks in use, whatever it caches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.question import Facts, Question, Scored, best


def tokens_in_hand(question: Question, candidate: Facts) -> int:
    """Queued prompt tokens, and tokens of the blocks in use."""
    return candidate.load.queued_tokens + candidate.load.active_blocks * question.block_size


class LeastLoadedPolicy:
    """Load alone."""

    def filter(self, question: Question, candidates: Sequence[Facts]) -> Sequence[Facts]:
        """All may."""
        return candidates

    def score(self, question: Question, candidate: Facts) -> Scored:
        """Tokens in hand."""
        tokens = tokens_in_hand(question, candidate)
        return Scored(candidate, tokens, f"{tokens} tokens in hand")

    def pick(self, question: Question, scored: Sequence[Scored], draw: Random) -> Scored:
        """The least loaded."""
        return best(question, scored, draw)
