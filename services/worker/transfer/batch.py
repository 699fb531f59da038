"""One batch of copies on its way through a lane: what was taken of it, and what became of that. Pure.

waiting ──take──▶ groups, the last one marked ──landed──▶ outcome
   └── cancelled, failed, too late, or no copies: the next group is empty, and the last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct, field

from services.worker.mover import Copied, Copy


class Landed(Struct, frozen=True):
    """A group that nothing reads or writes any more; fields as in Copied."""

    good: Sequence[bool]
    paths: Mapping[str, int] = {}
    fallbacks: Mapping[str, int] = {}
    differing: int = 0
    damaged: Sequence[int] = ()
    """By their place in the group."""
    checksums: Sequence[int] = ()


class Batch(Struct):
    """See the module."""

    number: int
    copies: Sequence[Copy]
    loads: bool
    until_s: float = inf
    """No group is taken from then on."""
    taken: int = 0
    """Of the copies."""
    good: list[bool] = field(default_factory=list)
    """Of the first copies, which have landed …"""
    paths: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    damaged: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    """… and these, too."""
    begun_s: float = 0.0
    """Of the first group …"""
    ended_s: float = 0.0
    """… and of the last that landed."""
    cancelled: bool = False
    failed: str = ""

    def take(self, most: int, now_s: float) -> tuple[Sequence[Copy], bool]:
        """The next copies, and whether they are the last that are made of it."""
        assert most > 0
        if self.cancelled or self.failed or now_s >= self.until_s:
            return (), True
        if self.taken == 0:
            self.begun_s = self.ended_s = now_s
        group = self.copies[self.taken : self.taken + most]
        self.taken += len(group)
        return group, self.taken == len(self.copies)

    def land(self, landed: Landed, now_s: float) -> None:
        """The oldest group that was taken and has not landed; not an empty one."""
        self.damaged.extend(len(self.good) + place for place in landed.damaged)
        self.checksums.extend(landed.checksums)
        self.good.extend(landed.good)
        for path, blocks in landed.paths.items():  # Counter.update costs a group 0.6 µs more
            self.paths[path] += blocks
        for reason, blocks in landed.fallbacks.items():
            self.fallbacks[reason] += blocks
        self.differing += landed.differing
        self.ended_s = now_s

    def outcome(self, block_bytes: int) -> Copied:
        """All that was taken has landed."""
        missing = len(self.copies) - len(self.good)
        return Copied(
            batch=self.number,
            good=[False] * len(self.copies) if self.failed else [*self.good, *[False] * missing],
            moved_bytes=len(self.good) * block_bytes,
            took_s=self.ended_s - self.begun_s,
            failed=self.failed,
            paths=dict(self.paths),
            fallbacks=dict(self.fallbacks),
            differing=self.differing,
            damaged=self.damaged,
            checksums=self.checksums,
        )

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself."""
        assert len(self.good) <= self.taken <= len(self.copies)
        assert self.begun_s <= self.ended_s
        assert self.paths.total() in (0, len(self.good))  # 0: whoever copied does not say
        assert self.differing <= self.good.count(False)
        assert self.loads or not self.differing
