"""A mover over a copier, and a real pool file. Its clock can hold a lane before each group."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from services.worker.contracts.mover import Copied
from services.worker.transfer.mover import TransferMover
from shared.pool.format import PoolGeometry
from shared.pool.map import PoolMap
from tests.worker.pool_file import make_pool
from tests.worker.transfer.devices import BLOCK_BYTES, Device, opened

LIMIT_S = 180.0
SIZE_BYTES = 4 << 20
GEOMETRY = PoolGeometry.of(SIZE_BYTES)
ARENA = GEOMETRY.arena(0, 1, BLOCK_BYTES)


class MoverClock:
    """Returns `now_s`. When closed, it holds a lane at its next reading and reports that."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0
        self.looks = 0
        self.seen: Callable[[], None] = lambda: None
        self._open = threading.Event()
        self._reached = threading.Event()
        self._open.set()

    def __call__(self) -> float:
        self.looks += 1
        self.seen()
        self._reached.set()
        assert self._open.wait(LIMIT_S)
        self.now_s += self.step_s
        return self.now_s

    def shut(self) -> None:
        self._open.clear()
        self._reached.clear()

    def reached(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        self._open.set()


class MoverRig:
    """A pool, mapped as the kvbm maps it and as an engine does, and a mover whose groups are single blocks."""

    def __init__(self, path: Path, device: Device, *, verify: bool = False, most_blocks: int = 1) -> None:
        make_pool(path, SIZE_BYTES)
        self.path = path
        self._pools = [PoolMap(path, grants=True), PoolMap(path)]
        self.kvbm, self.engine = (pool.arena(ARENA) for pool in self._pools)
        self.device = device
        self.clock = MoverClock()
        self.mover = TransferMover(device.copier, self.clock, most_blocks=most_blocks, verify=verify)
        self.mover.attach(self.engine)
        self.closed = False

    def fill(self, device_slot: int, seed: int) -> bytes:
        block = Random(seed).randbytes(BLOCK_BYTES)
        self.device.write(device_slot, block)
        return block

    def in_pool(self, slot: int) -> bytes:
        with self.kvbm.slot(slot) as memory:
            return bytes(memory)

    def damage(self, slot: int) -> None:
        """Flip a bit of the block in the pool's slot."""
        with self.kvbm.slot(slot) as memory:
            memory[BLOCK_BYTES - 1] ^= 1

    def ended(self, count: int = 1) -> list[Copied]:
        """Return the next `count` batches that end, without their paths."""
        told: list[Copied] = []
        while len(told) < count:
            readable, _, _ = select.select([self.mover], [], [], LIMIT_S)
            assert readable, "nothing has ended"
            told.extend(self.mover.ended())
        assert len(told) == count
        assert all(sum(copied.paths.values()) * BLOCK_BYTES == copied.moved_bytes for copied in told)
        assert not any(copied.fallbacks or "pageable" in copied.paths for copied in told), "not what seems to be tested"
        return [msgspec.structs.replace(copied, paths={}) for copied in told]

    def close(self) -> None:
        self.clock.release()
        if not self.closed:
            self.mover.close()
        for arena in (self.kvbm, self.engine):
            arena.close()
        for pool in self._pools:
            pool.close()


def rigged(kind: str, tmp_path: Path, *, verify: bool) -> Iterator[MoverRig]:
    # Linux pins no file of a disk's file system for as long as CUDA would.
    place = "/dev/shm" if kind == "cuda" else tmp_path
    with opened(kind) as device, TemporaryDirectory(dir=place) as directory:
        rig = MoverRig(Path(directory) / "pool", device, verify=verify)
        yield rig
        rig.close()
