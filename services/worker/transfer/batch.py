"""One batch of copies on its way through a lane: which copies were handed out, and what became of them. Pure.

waiting ──next_group──▶ groups, the last one marked ──add_result──▶ outcome
   └── cancelled, failed, too late, or no copies: the next group is empty, and it is the last one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct, field

from services.worker.contracts.mover import Copied, Copy


class GroupResult(Struct, frozen=True):
    """What became of a group that nothing reads or writes any more. Its fields mean what those of `Copied` mean."""

    good: Sequence[bool]
    paths: Mapping[str, int] = {}
    fallbacks: Mapping[str, int] = {}
    differing: int = 0
    damaged: Sequence[int] = ()
    """Indices of damaged loads within the group."""
    checksums: Sequence[int] = ()


class CopyBatch(Struct):
    """A batch of saves or of loads, handed out group by group. The module's picture shows its states."""

    number: int
    copies: Sequence[Copy]
    loads: bool
    until_s: float = inf
    """Clock time from which no further group is handed out."""
    taken: int = 0
    """How many of the copies were handed out, from the front."""
    good: list[bool] = field(default_factory=list)
    """One entry for each copy whose group has ended, in order. The next six fields cover the same copies."""
    paths: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    damaged: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    took_s: float = 0.0
    """Seconds that its groups took, each without those in which the group before it was still under way."""
    cancelled: bool = False
    failed: str = ""

    def next_group(self, most: int, now_s: float) -> tuple[Sequence[Copy], bool]:
        """Hand out the next copies, at most `most`, and say whether they are the last ones of this batch."""
        assert most > 0
        if self.cancelled or self.failed or now_s >= self.until_s:
            return (), True
        group = self.copies[self.taken : self.taken + most]
        self.taken += len(group)
        return group, self.taken == len(self.copies)

    def add_result(self, landed: GroupResult, took_s: float) -> None:
        """Record the result of the oldest group that is still under way. The group must not be an empty one."""
        self.damaged.extend(len(self.good) + place for place in landed.damaged)
        self.checksums.extend(landed.checksums)
        self.good.extend(landed.good)
        for path, blocks in landed.paths.items():  # Counter.update costs a group 0.6 µs more
            self.paths[path] += blocks
        for reason, blocks in landed.fallbacks.items():
            self.fallbacks[reason] += blocks
        self.differing += landed.differing
        self.took_s += took_s

    def outcome(self, block_bytes: int) -> Copied:
        """Return what became of the batch. Every group that was handed out must have ended."""
        missing = len(self.copies) - len(self.good)
        return Copied(
            batch=self.number,
            good=[False] * len(self.copies) if self.failed else [*self.good, *[False] * missing],
            moved_bytes=len(self.good) * block_bytes,
            took_s=self.took_s,
            failed=self.failed,
            paths=dict(self.paths),
            fallbacks=dict(self.fallbacks),
            differing=self.differing,
            damaged=self.damaged,
            checksums=self.checksums,
        )

    def validate(self) -> None:
        """Raise AssertionError if the batch contradicts itself."""
        assert len(self.good) <= self.taken <= len(self.copies)
        assert self.took_s >= 0
        assert self.paths.total() in (0, len(self.good))  # 0: the copier does not report paths
        assert self.differing <= self.good.count(False)
        assert self.loads or not self.differing
