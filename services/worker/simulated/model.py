"""SimulatedModel: takes a model's time and draws tokens, without its arithmetic. Pure.

The output repeats the prompt's tokens, from the first to the last and then from the start, without ends of sequence. So
it is text where the prompt is text, and a continuation on another worker draws the same tokens. An answer ends by
itself at a length that depends on the end of its prompt. An embedding depends on all of the prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from struct import pack
from zlib import crc32

from services.worker.contracts.messages import Ready
from services.worker.contracts.runner import Drawn, Work
from services.worker.simulated.timing import Timing
from shared.hashing import pack_tokens
from shared.messages.frames import TokenLogprob

_TELLING_TOKENS = 64
"""Number of the prompt's last tokens that decide how long the answer is. It exceeds the end that a chat template gives
to all prompts."""
_PATTERN_NUMBERS = 16


def embedding_of(checksum: int, size: int) -> bytes:
    """Return an embedding as Part carries it: some numbers that look random, repeated, of length 1."""
    pattern = [crc32(bytes((number,)), checksum) - (1 << 31) + 0.5 for number in range(_PATTERN_NUMBERS)]
    numbers = (pattern * -(-size // _PATTERN_NUMBERS))[:size]
    length = hypot(*numbers)
    return pack(f"<{size}f", *(number / length for number in numbers))


def unbarred(token: int, barred: Sequence[int], allowed: Sequence[int]) -> int:
    """Return the first of the allowed token ids that is not barred; `token` if all are."""
    return next((each for each in allowed if each not in barred), token)


class SimulatedModel:
    """One simulated model: seconds and tokens for the scheduler's works."""

    def __init__(self, facts: Ready, timing: Timing, *, output_tokens: int) -> None:
        """`output_tokens` is an answer's mean length. 0 if it ends only at its limits."""
        self.facts = facts
        self.timing = timing
        self._output_tokens = output_tokens
        self._eos = frozenset(facts.eos_token_ids)
        self._plain = next(token for token in range(facts.vocab_size + 1) if token not in self._eos)

    def draw(self, works: Sequence[Work]) -> list[Drawn | None]:
        """Return one entry per work, None for works that do not end."""
        return [
            self._embed(work) if work.sampling.pooling else self._draw(work) if work.ends else None for work in works
        ]

    def _draw(self, work: Work) -> Drawn:
        sampling = work.sampling
        token = work.history[(work.end - work.prompt_tokens) % work.prompt_tokens]
        if token in self._eos:
            token = self._plain
        barred = work.barred_now
        if token in barred:
            token = unbarred(token, barred, range(self.facts.vocab_size))
        if self._output_tokens and not sampling.ignore_eos and self._eos and not barred and self._ends(work):
            token = self.facts.eos_token_ids[0]
        return Drawn(token) if sampling.logprobs < 0 else Drawn(token, TokenLogprob(0.0))

    def _embed(self, work: Work) -> Drawn | None:
        """Make an embedding of a checksum of all tokens. For a mean the checksum is carried on from chunk to chunk, as
        an engine's sum is."""
        if work.sampling.pooling == "mean":
            carried = work.kept if work.start else 0
            assert isinstance(carried, int), "a mean begins where its prompt does"
            checksum = work.kept = crc32(pack_tokens(work.tokens), carried)
        else:
            checksum = crc32(pack_tokens(work.history))
        return Drawn(0, embedding=embedding_of(checksum, self.facts.embedding_size)) if work.ends else None

    def _ends(self, work: Work) -> bool:
        """Return whether the answer has its length."""
        least = self._output_tokens // 2
        if work.draw_index < least:
            return False
        end = pack_tokens(work.history[max(0, work.prompt_tokens - _TELLING_TOKENS) : work.prompt_tokens])
        return work.draw_index >= least + crc32(end) % (self._output_tokens + 1)
