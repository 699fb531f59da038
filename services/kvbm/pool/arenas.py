"""Which layout has which arena of the pool. Pure.

             assign                      assign to another layout, while no engine uses the first
    free ─────────▶ assigned to a layout ──────────────────────────────────────────────▶ assigned to the other

All arenas are of one size, a fixed share of the pool. A layout keeps its arena, and what is cached there, when its last
engine has ended: until another layout needs one and no arena is free.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from shared.errors import HeadraceError


class NoArena(HeadraceError):
    """Every arena belongs to a layout that is in use."""


class AssignedArena(Struct, frozen=True):
    """An arena for a layout, and the layout that lost it and all that was in it."""

    index: int
    former_layout: str | None = None


class Arenas:
    """The arenas of one pool. Layouts are named by their digests; there are at most as many layouts as arenas."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count
        self._index: dict[str, int] = {}
        """Arena of each layout; the layout that was asked for longest ago comes first."""

    @property
    def layouts(self) -> list[str]:
        return list(self._index)

    def index(self, layout: str) -> int | None:
        """Return the layout's arena; None if it has none."""
        return self._index.get(layout)

    def assign(self, layout: str, in_use: Collection[str]) -> AssignedArena:
        """Assign an arena to the layout, the same as before if it has one. `in_use` are the layouts that must keep
        theirs, because a living engine uses them or a copy is under way. Raise NoArena, and change nothing
        then."""
        if layout in self._index:
            index = self._index.pop(layout)
            self._index[layout] = index
            return AssignedArena(index)
        free = set(range(self.count)).difference(self._index.values())
        if free:
            # The same one after a restart, if possible: then engines need not map and pin memory again.
            wanted = xxh3_64_intdigest(layout.encode()) % self.count
            self._index[layout] = wanted if wanted in free else min(free)
            return AssignedArena(self._index[layout])
        for other in self._index:
            if other not in in_use:
                index = self._index.pop(other)
                self._index[layout] = index
                return AssignedArena(index, former_layout=other)
        raise NoArena(
            f"all {self.count} arenas of the pool are in use by the layouts {', '.join(self._index)}; another model,"
            " element type or kind of engine needs one more: pool.arenas of kvbm"
        )

    def undo_assign(self, layout: str, given: AssignedArena) -> None:
        """Undo the last `assign`, because the layout could not use its arena: the former layout has it again."""
        index = self._index.pop(layout)
        assert index == given.index
        if given.former_layout is not None:
            self._index = {given.former_layout: index, **self._index}

    def validate(self) -> None:
        """Raise AssertionError if the arenas contradict themselves."""
        indices = list(self._index.values())
        assert len(set(indices)) == len(indices), f"an arena is given twice: {self._index}"
        assert all(0 <= index < self.count for index in indices), f"an arena that is not there: {self._index}"
