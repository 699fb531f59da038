"""Which layout has which arena of the pool. Pure.

             give                        give to another layout, while nobody uses the first
    free ─────────▶ given to a layout ──────────────────────────────────────────────────────▶ given to the other

All arenas are of one size, a fixed share of the pool. A layout keeps its arena, and what is cached there, when its last
engine is gone: until another layout needs one and no arena is free.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from shared.errors import HeadraceError


class NoArena(HeadraceError):
    """Every arena belongs to a layout that is in use."""


class AssignedArena(Struct, frozen=True):
    """An arena for a layout, and the layout that had it until now and has lost all that was in it."""

    index: int
    former_layout: str | None = None


class Arenas:
    """The arenas of one pool. Layouts are named by their digests; there are as many layouts as arenas at most."""

    def __init__(self, count: int) -> None:
        assert count > 0
        self.count = count
        self._index: dict[str, int] = {}
        """By layout; the one longest without being asked for first."""

    @property
    def layouts(self) -> list[str]:
        return list(self._index)

    def index(self, layout: str) -> int | None:
        """The layout's arena; None: it has none."""
        return self._index.get(layout)

    def assign(self, layout: str, in_use: Collection[str]) -> AssignedArena:
        """The layout's arena, the same as before where it has one. `in_use`: the layouts that must keep theirs, since
        an engine that lives uses them or a copy is under way. Raises NoArena; nothing has changed then."""
        if layout in self._index:
            index = self._index.pop(layout)
            self._index[layout] = index
            return AssignedArena(index)
        free = set(range(self.count)).difference(self._index.values())
        if free:
            # The same one after a restart, as far as it can be: engines then need not map and pin memory anew.
            wanted = xxh3_64_intdigest(layout.encode()) % self.count
            self._index[layout] = wanted if wanted in free else min(free)
            return AssignedArena(self._index[layout])
        for other in self._index:
            if other not in in_use:
                index = self._index.pop(other)
                self._index[layout] = index
                return AssignedArena(index, former_layout=other)
        raise NoArena(f"all {self.count} arenas of the pool are in use by the layouts {', '.join(self._index)}")

    def undo_assign(self, layout: str, given: AssignedArena) -> None:
        """The layout could not use what it was given, last of all: whoever had it before has it still."""
        index = self._index.pop(layout)
        assert index == given.index
        if given.former_layout is not None:
            self._index = {given.former_layout: index, **self._index}

    def validate(self) -> None:
        """Raises AssertionError where the arenas contradict themselves."""
        indices = list(self._index.values())
        assert len(set(indices)) == len(indices), f"an arena is given twice: {self._index}"
        assert all(0 <= index < self.count for index in indices), f"an arena that is not there: {self._index}"
