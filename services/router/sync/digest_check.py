"""Whether a source's own digest agrees with what we made of its events. Pure.

    load report        (epoch, sequence, digest)  ──▶ claims ──┐
                                                               ├─ of the same epoch and sequence ──▶ agreed | differed
    chains, applied    (epoch, sequence, digest)  ──▶ states ──┘                                     | exempt

    resting ──a claim, `every_s` after the last verdict──▶ open ──verdict──▶ resting

Reports and events come by different ways and either may be ahead, so the last few of both are kept while open. A
comparison is made as of one sequence: what is on its way makes no difference. One check a candidate, of all tiers that
its source keeps a digest of: a worker's device, a kvbm's host memory and disk. Chains that had to leave something out
cannot agree, and are exempt.
"""

from __future__ import annotations

from typing import Literal, TypeVar

DigestResult = Literal["agreed", "differed", "exempt"]

CLAIMS_LIMIT = 16
STATES_LIMIT = 256
"""The oldest goes: a report that comes so late is followed by others."""

_Mark = tuple[int | None, int]
"""(epoch, sequence)."""
Digests = tuple[int, ...]
"""One a tier, always of the same tiers."""


class DigestCheck:
    """Compares one candidate's digests, at most every `every_s` seconds; 0: never."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._due_s: float | None = None
        """No comparison before; None: at once."""
        self._opened_s = 0.0
        self._claims: dict[_Mark, Digests] = {}
        self._states: dict[_Mark, Digests | None] = {}
        """None: the chains had left something out."""
        self.open = False
        """A comparison is due: `applied` is to be told."""

    def source_digest(self, epoch: int, sequence: int, digests: Digests, now_s: float) -> DigestResult | None:
        """The source says that its blocks have these digests as of a sequence."""
        if not self._every_s or (self._due_s is not None and now_s < self._due_s):
            return None
        self.open = True
        self._opened_s = now_s
        _keep(self._claims, (epoch, sequence), digests, CLAIMS_LIMIT)
        return self._compare((epoch, sequence))

    def chains_digest(self, epoch: int | None, sequence: int, digests: Digests | None) -> DigestResult | None:
        """The chains have these digests as of a sequence; None: they had to leave something out."""
        if not self.open:
            return None
        _keep(self._states, (epoch, sequence), digests, STATES_LIMIT)
        return self._compare((epoch, sequence))

    def chains_cleared(self) -> None:
        """The chains begin anew: what they were is no longer to be compared."""
        self._states.clear()

    def _compare(self, mark: _Mark) -> DigestResult | None:
        """open → resting, if both have told of this sequence."""
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


def _keep(kept: dict[_Mark, V], mark: _Mark, value: V, limit: int) -> None:
    kept[mark] = value
    if len(kept) > limit:
        del kept[next(iter(kept))]
