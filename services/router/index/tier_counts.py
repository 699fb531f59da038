"""Counts blocks below the device, per slot, along one walk through a prompt. Pure.

    block     0 1 2 3 4 5 6 7 8
    slot a    D D D D H H H H ·       on the device up to 4, in host memory up to 8
    slot b    D D D D D D H H ·       from 6 on there are two groups; at 8 both end: a has 4 in host memory, b has 2

A group's count in a tier is the sum of (end - start) over its stretches there. While a stretch lasts, only its start is
subtracted; `at`, the block where the chain ends, is added when the counts are read.

Work is done only where a slot's tier changes, and once for all slots whose counts are equal so far. A
store's blocks count for every worker that is attached to it, and a long stretch costs as much as a short one.
"""

from __future__ import annotations

from collections.abc import Iterator

_DEVICE, _HOST, _DISK = range(3)

_Group = tuple[int, int, int]
"""(current tier, count of blocks in host memory, count of blocks on disk). The count of the current tier has the start
of the current stretch subtracted already, and may be negative."""


class TierCounts:
    """The slots that were below the device at some block. Masks have one bit per slot."""

    __slots__ = ("_disk", "_groups", "_host", "slots")

    def __init__(self) -> None:
        self.slots = 0
        """Mask of all slots that are or were below the device, those whose chains have ended included."""
        self._groups: dict[_Group, int] = {}
        """Group → mask of the slots whose counts it has."""
        self._host = self._disk = 0
        """Masks of the slots that are in host memory now, and on disk now."""

    def update(self, alive: int, host: int, disk: int, at: int) -> None:
        """Record that, from block `at` on, the slots `alive` hold their blocks in host memory, on disk or, for all
        others, on the device."""
        moved = alive & ((host ^ self._host) | (disk ^ self._disk))
        self._host, self._disk = host, disk
        if not moved:
            return
        new = moved & ~self.slots
        joining = [(new, 0, 0)] if new else []
        if new != moved:
            for group, slots in list(self._groups.items()):
                part = slots & moved
                if part:
                    self._leave(group, slots ^ part)
                    tier, in_host, on_disk = group
                    joining.append((part, in_host + at * (tier == _HOST), on_disk + at * (tier == _DISK)))
        for part, in_host, on_disk in joining:  # only after all have left: a group may be both left and joined
            self._join(part, in_host, on_disk, at)
        self.slots |= new

    def counts_at(self, slots: int, at: int) -> Iterator[tuple[int, int, int]]:
        """For chains of `slots` that end before block `at`, yield (slots, blocks in host memory, blocks on disk), once
        for each group of slots with equal counts."""
        for (tier, in_host, on_disk), alike in self._groups.items():
            part = alike & slots
            if part:
                yield part, in_host + at * (tier == _HOST), on_disk + at * (tier == _DISK)

    def _join(self, slots: int, in_host: int, on_disk: int, at: int) -> None:
        """Add slots with these counts to the groups of the tiers that they are in now."""
        host, disk = slots & self._host, slots & self._disk
        device = slots & ~host & ~disk
        groups = self._groups
        if host:
            group = _HOST, in_host - at, on_disk
            groups[group] = groups.get(group, 0) | host
        if disk:
            group = _DISK, in_host, on_disk - at
            groups[group] = groups.get(group, 0) | disk
        if device:
            group = _DEVICE, in_host, on_disk
            groups[group] = groups.get(group, 0) | device

    def _leave(self, group: _Group, left: int) -> None:
        if left:
            self._groups[group] = left
        else:
            del self._groups[group]
