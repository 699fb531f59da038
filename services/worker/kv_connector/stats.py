"""Tally: what an engine has exchanged with kvbm since it started, summed up from batches of copies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from services.worker.messages import Exchanged
from services.worker.mover import Copied

MOST_NAMES = 32
"""Of ways, or of reasons: what comes after them is counted together."""
OTHER = "other"


class Tally:
    """See the module."""

    def __init__(self) -> None:
        self._exchanged = self._told = Exchanged()

    def saved(self, copied: Copied) -> None:
        """A batch to the pool has ended."""
        now = self._exchanged
        self._count(
            copied,
            saved_bytes=now.saved_bytes + copied.moved_bytes,
            save_s=now.save_s + copied.took_s,
            saved_by=summed(now.saved_by, copied.paths),
        )

    def loaded(self, copied: Copied) -> None:
        """A batch from the pool has ended."""
        now = self._exchanged
        self._count(
            copied,
            loaded_blocks=now.loaded_blocks + sum(copied.good),
            loaded_bytes=now.loaded_bytes + copied.moved_bytes,
            load_s=now.load_s + copied.took_s,
            loaded_by=summed(now.loaded_by, copied.paths),
            differing_blocks=now.differing_blocks + copied.differing,
            damaged_blocks=now.damaged_blocks + len(copied.damaged),
        )

    def committed(self, blocks: int) -> None:
        """The kvbm has so many more blocks."""
        if blocks:
            saved_blocks = self._exchanged.saved_blocks + blocks
            self._exchanged = msgspec.structs.replace(self._exchanged, saved_blocks=saved_blocks)

    def discarded(self, blocks: int) -> None:
        """So many were named to the kvbm as wrong, perhaps."""
        discarded_blocks = self._exchanged.discarded_blocks + blocks
        self._exchanged = msgspec.structs.replace(self._exchanged, discarded_blocks=discarded_blocks)

    @property
    def changed(self) -> bool:
        """Whether there is `news`."""
        return self._exchanged is not self._told

    def news(self) -> Exchanged | None:
        """All sums, where they are more than was told."""
        if not self.changed:
            return None
        self._told = self._exchanged
        return self._exchanged

    def _count(self, copied: Copied, **sums: float | dict[str, int]) -> None:
        now = self._exchanged
        self._exchanged = msgspec.structs.replace(
            now,
            bad_blocks=now.bad_blocks + copied.good.count(False),
            fallbacks=summed(now.fallbacks, copied.fallbacks),
            **sums,
        )


def summed(sums: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Both together, of at most MOST_NAMES names and OTHER."""
    total = dict(sums)
    for name, count in more.items():
        known = told_apart(name, total)
        total[known] = total.get(known, 0) + count
    return total


def told_apart(name: str, known: Collection[str]) -> str:
    """What a name counts as, beside those that are known already."""
    return name if name in known or len(known) < MOST_NAMES else OTHER
