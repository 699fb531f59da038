"""A pool in a tmpfs, and who asks a mover to copy to and from it, as an engine does."""

from __future__ import annotations

import os
import select
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from math import inf
from pathlib import Path

import numpy as np

from services.worker.mover import Copy, Mover
from shared.pool.format import Geometry
from shared.pool.map import ArenaMap, PoolMap, touch


@contextmanager
def pool(memory: Path, size_bytes: int) -> Iterator[tuple[Path, Geometry]]:
    """A pool's file as a kvbm makes it, in a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-", dir=memory) as directory:
        path, geometry = Path(directory) / "pool", Geometry.of(size_bytes)
        path.touch(0o600)
        os.truncate(path, size_bytes)
        with path.open("r+b") as opened:
            opened.write(geometry.header())
        yield path, geometry


@contextmanager
def arena(path: Path, geometry: Geometry, block_bytes: int) -> Iterator[ArenaMap]:
    """All of a pool as slots for blocks of this size, touched."""
    mapped = PoolMap(path)
    slots = mapped.arena(geometry.arena(0, 1, block_bytes))
    touch(slots.bytes)
    try:
        yield slots
    finally:
        slots.close()
        mapped.close()


def scattered(slots: ArenaMap, device_slots: Sequence[int]) -> list[Copy]:
    """In random order on both sides, as many as the smaller of both has."""
    draw = np.random.default_rng(1)
    pairs = zip(draw.permutation(slots.arena.slots).tolist(), draw.permutation(device_slots).tolist(), strict=False)
    return [Copy(there, here, slots.generation(there)) for there, here in pairs]


class EndedBatch:
    """What a mover was asked and has not told yet."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._next = 0
        self._loads: dict[int, bool] = {}
        """Batches under way."""
        self.paths: Counter[str] = Counter()
        """Blocks that were copied, by the way they took …"""
        self.moved_bytes = {False: 0, True: 0}
        """… and bytes, of saves and of loads."""

    def ask(self, copies: Sequence[Copy], *, loads: bool) -> None:
        """One batch."""
        if loads:
            self._mover.load(self._next, copies)
        else:
            self._mover.save(self._next, copies, inf)
        self._loads[self._next] = loads
        self._next += 1

    def under_way(self, *, loads: bool) -> int:
        return sum(each == loads for each in self._loads.values())

    def hear(self) -> None:
        """What has ended by now. Raises AssertionError where a copy went wrong."""
        for copied in self._mover.ended():
            assert all(copied.good), copied
            self.moved_bytes[self._loads.pop(copied.batch)] += copied.moved_bytes
            self.paths.update(copied.paths)

    def wait(self) -> None:
        """Until nothing is under way."""
        while self._loads:
            select.select([self._mover], [], [])
            self.hear()

    def move(self, saves: Sequence[Copy], loads: Sequence[Copy], batch: int) -> None:
        """In batches of so many, asked for all at once, saves and loads in turn; returns when all were told."""
        for pair in zip_longest(_cut(saves, batch), _cut(loads, batch), fillvalue=()):
            for copies, direction in zip(pair, (False, True), strict=True):
                if copies:
                    self.ask(copies, loads=direction)
        self.wait()


def _cut(copies: Sequence[Copy], batch: int) -> Iterator[Sequence[Copy]]:
    for first in range(0, len(copies), batch):
        yield copies[first : first + batch]
