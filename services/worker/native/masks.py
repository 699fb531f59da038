"""Which tokens the rows of a step may draw, made in a thread while the step's logits are computed.

    begin ─▶ each matcher takes its sequence's tokens since the last step ─▶ its mask ─▶ end
                └── none yet: of the compiled grammar, and all of the output so far

A matcher lives while its sequence is in every step. One that was preempted, or began on another worker, has a new one
that is given the output so far, and so stands where the old one stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from services.worker.native.grammars import GrammarCache
from services.worker.runner import Work
from shared.messages import UNFOLLOWABLE

_CUT = "<non-verbose/>"
"""llguidance's word for what it leaves out of an error."""
_TOLD_CHARACTERS = 300
"""Of an error; it may hold all of the grammar."""


@dataclass(frozen=True)
class Masks:
    """By `Work.sequence`; sequences that are held to nothing are in neither."""

    allowed: Mapping[int, NDArray[np.bool_]]
    """(vocab,), at least one of them true."""
    failed: Mapping[int, str]
    """Why there is no mask."""


NO_MASKS = Masks({}, {})


@dataclass
class _Matching:
    matcher: LLMatcher
    taken: int = 0
    """Tokens of the output."""


class MaskThread:
    """The matchers of an engine, and their thread, which starts when it is first needed."""

    def __init__(self, grammars: GrammarCache | None) -> None:
        """None: no work has a grammar."""
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "masks")
        self._matching: dict[int, _Matching] = {}
        """The thread's, between `begin` and `end`."""
        self._under_way: Future[Masks] | None = None

    def begin(self, works: Sequence[Work]) -> None:
        """Start on all works of a step; those that do not draw yet have their grammars compiled meanwhile."""
        assert self._under_way is None
        held = [work for work in works if work.sampling.grammar]
        if held:
            self._under_way = self._thread.submit(self._masks, held)
        elif self._matching:
            self._matching.clear()

    def end(self) -> Masks:
        """Waits for those of the works that draw. Once after each `begin`."""
        if self._under_way is None:
            return NO_MASKS
        under_way, self._under_way = self._under_way, None
        return under_way.result()

    def close(self) -> None:
        """The thread has ended when this returns."""
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
                    failed[work.sequence] = f"{UNFOLLOWABLE}: {mask:.{_TOLD_CHARACTERS}}"
                else:
                    allowed[work.sequence] = mask
        return Masks(allowed, failed)


def _mask(one: _Matching, work: Work, vocab: int) -> NDArray[np.bool_] | str:
    """Or why there is none. llguidance lets go of Python's lock while it computes."""
    new = work.history[work.prompt_tokens + one.taken :]
    one.matcher.consume_tokens(list(new))
    one.taken += len(new)
    bits = one.matcher.compute_bitmask()
    if one.matcher.is_error():
        return one.matcher.get_error().removesuffix(_CUT).rstrip()
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=vocab, bitorder="little").view(np.bool_)
    return mask if mask.any() else "no token can follow"
