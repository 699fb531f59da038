"""Computes which tokens the rows of a step may draw, in a thread, while the step's logits are computed.

    begin ─▶ each matcher consumes its sequence's tokens since the last step ─▶ its mask ─▶ end
                └── no matcher yet: a new one of the compiled grammar, which consumes all of the output so far

A matcher lives while its sequence is in every step. A sequence that was preempted, or began on another worker, gets a
new matcher. It consumes the output so far and so reaches the old one's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.worker.contracts.runner import Work
from services.worker.native.grammars import GrammarCache
from shared.messages.frames import UNFOLLOWABLE

_CUT = "<non-verbose/>"
"""The marker that llguidance puts where it shortens an error."""
_ERROR_CHARACTERS = 300
"""The most characters of an error, which could otherwise contain the whole grammar."""


@dataclass(frozen=True)
class Masks:
    """Masks by `Work.sequence`; a sequence without a grammar is in neither mapping."""

    allowed: Mapping[int, NDArray[np.bool_]]
    """Which tokens may be drawn: (vocab,), at least one of them true."""
    failed: Mapping[int, str]
    """Why a sequence has no mask."""


NO_MASKS = Masks({}, {})


@dataclass
class _Matching:
    matcher: LLMatcher
    taken: int = 0
    """How many tokens of the output the matcher has consumed."""


class MaskThread:
    """The matchers of an engine, and their thread, which starts when it is first needed."""

    def __init__(self, grammars: GrammarCache | None) -> None:
        """Start without matchers. Without `grammars` no work may have a grammar."""
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "masks")
        self._matching: dict[int, _Matching] = {}
        """The matcher of each sequence. It belongs to the thread between `begin` and `end`."""
        self._under_way: Future[Masks] | None = None

    def begin(self, works: Sequence[Work]) -> None:
        """Start computing the masks of a step. The grammars of works that do not draw yet are compiled too."""
        assert self._under_way is None
        held = [work for work in works if work.sampling.grammar]
        if held:
            self._under_way = self._thread.submit(self._masks, held)
        elif self._matching:
            self._matching.clear()

    def end(self) -> Masks:
        """Wait for the masks of the works that draw and return them. Call this once after each `begin`."""
        if self._under_way is None:
            return NO_MASKS
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def close(self) -> None:
        """End the thread and wait for its end."""
        self._thread.shutdown()

    def _masks(self, works: Sequence[Work]) -> Masks:
        assert self._grammars is not None, "attempts with a grammar are refused"
        before, self._matching = self._matching, {}
        allowed: dict[int, NDArray[np.bool_]] = {}
        failed: dict[int, str] = {}
        for work in works:
            one = before.get(work.sequence) or _Matching(self._grammars.matcher(work.sampling.grammar))
            self._matching[work.sequence] = one
            if work.draws:
                mask = _mask(one, work, self._grammars.vocab)
                if isinstance(mask, str):
                    failed[work.sequence] = f"{UNFOLLOWABLE}: {mask:.{_ERROR_CHARACTERS}}"
                else:
                    allowed[work.sequence] = mask
        return Masks(allowed, failed)


def _mask(one: _Matching, work: Work, vocab: int) -> NDArray[np.bool_] | str:
    """Return the work's mask, or why there is none. llguidance releases Python's lock while it computes."""
    new = work.history[work.prompt_tokens + one.taken :]
    one.matcher.consume_tokens(list(new))
    one.taken += len(new)
    bits = one.matcher.compute_bitmask()
    if one.matcher.is_error():
        return one.matcher.get_error().removesuffix(_CUT).rstrip()
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab, bitorder="little").view(np.bool_)
    return mask if mask.any() else "no token can follow"
