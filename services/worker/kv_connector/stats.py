"""TransferStats: what an engine has exchanged with kvbm since it started, summed up from batches of copies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from services.worker.contracts.messages import Exchanged
from services.worker.contracts.mover import Copied

MOST_NAMES = 32
"""Most names of paths, or of reasons; names that come after them are counted together as `OTHER`."""
OTHER = "other"


class TransferStats:
    """One engine's sums."""

    def __init__(self) -> None:
        self._totals = self._returned = Exchanged()

    def count_saved(self, copied: Copied) -> None:
        """A batch of copies to the pool has ended."""
        now = self._totals
        self._count(
            copied,
            saved_bytes=now.saved_bytes + copied.moved_bytes,
            save_s=now.save_s + copied.took_s,
            saved_by=add_counts(now.saved_by, copied.paths),
        )

    def count_loaded(self, copied: Copied) -> None:
        """A batch of copies from the pool has ended."""
        now = self._totals
        self._count(
            copied,
            loaded_blocks=now.loaded_blocks + sum(copied.good),
            loaded_bytes=now.loaded_bytes + copied.moved_bytes,
            load_s=now.load_s + copied.took_s,
            loaded_by=add_counts(now.loaded_by, copied.paths),
            differing_blocks=now.differing_blocks + copied.differing,
            damaged_blocks=now.damaged_blocks + len(copied.damaged),
        )

    def count_committed(self, blocks: int) -> None:
        """The kvbm has `blocks` more blocks."""
        if blocks:
            saved_blocks = self._totals.saved_blocks + blocks
            self._totals = msgspec.structs.replace(self._totals, saved_blocks=saved_blocks)

    def count_discarded(self, blocks: int) -> None:
        """The kvbm was asked to discard `blocks` blocks, since they may be wrong."""
        discarded_blocks = self._totals.discarded_blocks + blocks
        self._totals = msgspec.structs.replace(self._totals, discarded_blocks=discarded_blocks)

    def note_sharing(self, failures: int, failing: bool) -> None:
        """The engine could not begin to share `failures` times, the last time among them if it is `failing`."""
        now = self._totals
        if now.sharing_failures != failures or now.sharing_fails != failing:
            self._totals = msgspec.structs.replace(now, sharing_failures=failures, sharing_fails=failing)

    @property
    def changed(self) -> bool:
        """Whether `new_totals` would return any."""
        return self._totals is not self._returned

    def new_totals(self) -> Exchanged | None:
        """Return all sums, or None if they are as they were at the last call."""
        if not self.changed:
            return None
        self._returned = self._totals
        return self._totals

    def _count(self, copied: Copied, **sums: float | dict[str, int]) -> None:
        now = self._totals
        self._totals = msgspec.structs.replace(
            now,
            bad_blocks=now.bad_blocks + copied.good.count(False),
            fallbacks=add_counts(now.fallbacks, copied.fallbacks),
            **sums,
        )


def add_counts(sums: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of both for each name, of at most MOST_NAMES names and OTHER."""
    total = dict(sums)
    for name, count in more.items():
        counted = bounded_name(name, total)
        total[counted] = total.get(counted, 0) + count
    return total


def bounded_name(name: str, known: Collection[str]) -> str:
    """Return the name under which `name` is counted next to the known ones: OTHER where they are MOST_NAMES."""
    return name if name in known or len(known) < MOST_NAMES else OTHER
