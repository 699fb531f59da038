"""A pool in a tmpfs, and a caller of a mover that copies to and from it, as an engine does."""

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

from services.worker.contracts.mover import Copy, Mover
from shared.pool.format import PoolGeometry
from shared.pool.map import ArenaMap, PoolMap, touch


@contextmanager
def pool(memory: Path, size_bytes: int) -> Iterator[tuple[Path, PoolGeometry]]:
    """Make a pool's file in a tmpfs, as kvbm does."""
    with tempfile.TemporaryDirectory(prefix="gpu-pool-", dir=memory) as directory:
        path, geometry = Path(directory) / "pool", PoolGeometry.of(size_bytes)
        path.touch(0o600)
        os.truncate(path, size_bytes)
        with path.open("r+b") as opened:
            opened.write(geometry.header())
        yield path, geometry


@contextmanager
def arena(path: Path, geometry: PoolGeometry, block_bytes: int) -> Iterator[ArenaMap]:
    """Map a pool as slots for blocks of this size, and touch all of it."""
    mapped = PoolMap(path)
    slots = mapped.arena(geometry.arena(0, 1, block_bytes))
    touch(slots.bytes)
    try:
        yield slots
    finally:
        slots.close()
        mapped.close()


def scattered(slots: ArenaMap, device_slots: Sequence[int]) -> list[Copy]:
    """Pair slots in random order on both sides, as many as the smaller side has."""
    draw = np.random.default_rng(1)
    pairs = zip(draw.permutation(slots.arena.slots).tolist(), draw.permutation(device_slots).tolist(), strict=False)
    return [Copy(there, here, slots.generation(there)) for there, here in pairs]


class EndedBatch:
    """The batches that a mover has not ended yet."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._next = 0
        self._loads: dict[int, bool] = {}
        """The batches under way, and whether each one loads."""
        self.paths: Counter[str] = Counter()
        """Copied blocks by their path."""
        self.moved_bytes = {False: 0, True: 0}
        """Copied bytes of saves and of loads."""

    def ask(self, copies: Sequence[Copy], *, loads: bool) -> None:
        """Ask the mover for one batch."""
        if loads:
            self._mover.load(self._next, copies)
        else:
            self._mover.save(self._next, copies, inf)
        self._loads[self._next] = loads
        self._next += 1

    def under_way(self, *, loads: bool) -> int:
        return sum(each == loads for each in self._loads.values())

    def hear(self) -> None:
        """Take in the batches that have ended. Raises AssertionError if a copy failed."""
        for copied in self._mover.ended():
            assert all(copied.good), copied
            self.moved_bytes[self._loads.pop(copied.batch)] += copied.moved_bytes
            self.paths.update(copied.paths)

    def wait(self) -> None:
        """Wait until nothing is under way."""
        while self._loads:
            select.select([self._mover], [], [])
            self.hear()

    def move(self, saves: Sequence[Copy], loads: Sequence[Copy], batch: int) -> None:
        """Ask for all copies at once, in batches of `batch`, saves and loads in turn; wait for their end."""
        for pair in zip_longest(_cut(saves, batch), _cut(loads, batch), fillvalue=()):
            for copies, direction in zip(pair, (False, True), strict=True):
                if copies:
                    self.ask(copies, loads=direction)
        self.wait()


def _cut(copies: Sequence[Copy], batch: int) -> Iterator[Sequence[Copy]]:
    for first in range(0, len(copies), batch):
        yield copies[first : first + batch]
