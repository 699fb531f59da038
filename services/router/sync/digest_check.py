"""Compares a source's own digest with the digest of the blocks that its events left in our chains. Pure.

    load report        (epoch, sequence, digest)  ──▶ claims ──┐
                                                               ├─ same epoch and sequence ──▶ agreed | differed
    chains, applied    (epoch, sequence, digest)  ──▶ states ──┘                              | exempt

    resting ──a claim, `every_s` after the last result──▶ open ──result──▶ resting

Reports and events take different ways and either may be ahead, so the last few of both are kept while the check is
open. Both digests are taken at the same sequence: events on their way make no difference. There is one check per
candidate, for all tiers of which its source keeps a digest: a worker's device, or a kvbm's host memory and disk. Chains
that had to leave blocks out cannot agree, and are exempt.
"""

from __future__ import annotations

from typing import Literal, TypeVar

DigestResult = Literal["agreed", "differed", "exempt"]

CLAIMS_LIMIT = 16
STATES_LIMIT = 256
"""Most states kept; the oldest is dropped: if a report comes that late, newer reports follow it."""

_Mark = tuple[int | None, int]
"""Two digests can be compared if this pair is equal: (epoch, sequence)."""
Digests = tuple[int, ...]
"""One digest per tier, always of the same tiers."""


class DigestCheck:
    """Compares one candidate's digests, at most every `every_s` seconds; 0 disables it."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._due_s: float | None = None
        """When the next comparison may begin. None means at once."""
        self._opened_s = 0.0
        self._claims: dict[_Mark, Digests] = {}
        self._states: dict[_Mark, Digests | None] = {}
        """Digests of the chains; None if the chains had left blocks out."""
        self.open = False
        """Whether a comparison is due: then `add_chains_digest` must be called."""

    def add_source_digest(self, epoch: int, sequence: int, digests: Digests, now_s: float) -> DigestResult | None:
        """Add a digest that the source reported for a sequence."""
        if not self._every_s or (self._due_s is not None and now_s < self._due_s):
            return None
        self.open = True
        self._opened_s = now_s
        _keep_latest(self._claims, (epoch, sequence), digests, CLAIMS_LIMIT)
        return self._compare((epoch, sequence))

    def add_chains_digest(self, epoch: int | None, sequence: int, digests: Digests | None) -> DigestResult | None:
        """Add the digest of our chains at a sequence; None if blocks were left out of them."""
        if not self.open:
            return None
        _keep_latest(self._states, (epoch, sequence), digests, STATES_LIMIT)
        return self._compare((epoch, sequence))

    def chains_cleared(self) -> None:
        """Forget the states of the chains, which start from empty again."""
        self._states.clear()

    def _compare(self, mark: _Mark) -> DigestResult | None:
        """open → resting, if both digests of this sequence are known."""
        if mark not in self._claims or mark not in self._states:
            return None
        claim, state = self._claims[mark], self._states[mark]
        self.open = False
        self._claims.clear()
        self._states.clear()
        self._due_s = self._opened_s + self._every_s
        if state is None:
            return "exempt"
        return "agreed" if state == claim else "differed"

    def validate(self) -> None:
        """Assert every invariant."""
        assert self.open or not (self._claims or self._states)
        assert len(self._claims) <= CLAIMS_LIMIT
        assert len(self._states) <= STATES_LIMIT
        assert not self._claims.keys() & self._states.keys(), "a pair is a verdict"


V = TypeVar("V")


def _keep_latest(kept: dict[_Mark, V], mark: _Mark, value: V, limit: int) -> None:
    kept[mark] = value
    if len(kept) > limit:
        del kept[next(iter(kept))]
