"""In which tiers the slots count, along one walk through a prompt. Pure.

    block     0 1 2 3 4 5 6 7 8
    slot a    D D D D H H H H ·       on the device up to 4, in host memory up to 8
    slot b    D D D D D D H H ·       two groups from 6 on, ended at 8: 4 of a and 2 of b in host memory

Work is done only where a slot's tier changes, and for all slots at once that have counted alike so far: a store's
blocks are within reach of every worker attached to it, and long stretches of them cost as much as short ones.
"""

from __future__ import annotations

from collections.abc import Iterator

_DEVICE, _HOST, _DISK = range(3)

_Group = tuple[int, int, int]
"""(tier now, blocks in host memory, on disk). Of the tier they are in now, less the block where that began."""


class Lower:
    """The slots that were below the device at some block. Masks have a bit for each slot."""

    __slots__ = ("_disk", "_groups", "_host", "slots")

    def __init__(self) -> None:
        self.slots = 0
        """All that count below the device now, or did; those that have ended stay."""
        self._groups: dict[_Group, int] = {}
        """Which of them have counted alike."""
        self._host = self._disk = 0
        """Those in host memory now, and on disk."""

    def changed(self, alive: int, host: int, disk: int, at: int) -> None:
        """From block `at` on the slots `alive` hold their blocks in host memory, on disk or, the others, on the
        device."""
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
        for part, in_host, on_disk in joining:  # once all have left: a group that is joined may be one that is left
            self._join(part, in_host, on_disk, at)
        self.slots |= new

    def ended(self, slots: int, at: int) -> Iterator[tuple[int, int, int]]:
        """The chains of `slots` end before block `at`: (slots, blocks in host memory, blocks on disk) of those that
        count alike."""
        for (tier, in_host, on_disk), alike in self._groups.items():
            part = alike & slots
            if part:
                yield part, in_host + at * (tier == _HOST), on_disk + at * (tier == _DISK)

    def _join(self, slots: int, in_host: int, on_disk: int, at: int) -> None:
        """Slots that have so many blocks below the device so far go on in the tiers they are in now."""
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
