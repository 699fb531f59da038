"""PoolAttachment: an engine process's lock next to the pool of its machine's kvbm, and its mapping of the pool.

    hold ──▶ the lock is held ──map──▶ one layout's slots are mapped ──map──▶ the same slots, or others if they changed
    OwnerName                          MappedPool

The lock says that this process lives and may write; the process holds it as long as it lives. An engine of several
processes has the two parts in different ones.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.worker.contracts.runner import AttachedPool
from shared.messages.kvbm import Attached
from shared.pool.format import Arena, PoolUnfit
from shared.pool.lock import POOL, HeldLock, hold_owner, join_owner
from shared.pool.map import ArenaMap, PoolMap


class OwnerName:
    """The name under which an engine process holds a lock in `directory`."""

    def __init__(self, directory: Path, instance: str, number: int | None = None, *, shared: bool = False) -> None:
        """`number` is an open descriptor that the lock replaces; `shared.pool.lock` says why one would do that. With
        `shared`, the engine's other processes may join the lock."""
        self._directory = directory
        self._instance = instance
        self._number = number
        self._shared = shared
        self._lock: HeldLock | None = None

    def hold(self) -> str:
        """Return the name under which this process holds a lock, the same one as long as its file is there. No copy is
        under way. Raise PoolUnfit."""
        try:
            if self._lock is None or not self._lock.held:
                # A new name each time: everything that the kvbm keeps for the old owner ends with the old lock.
                name = f"{self._instance}-{os.urandom(4).hex()}"
                return self._keep(hold_owner(self._directory, name, shared=self._shared))
        except OSError as wrong:
            raise PoolUnfit(f"{self._directory}: {wrong.strerror}") from None
        return self._lock.path.name

    @property
    def held(self) -> str:
        """The name that this process holds."""
        assert self._lock is not None
        return self._lock.path.name

    def join(self, owner: str) -> None:
        """Share the lock of another process of this engine, in place of the one before. No copy is under way. Raise
        PoolUnfit."""
        try:
            if self._lock is None or self._lock.path.name != owner or not self._lock.held:
                self._keep(join_owner(self._directory, owner))
        except OSError as wrong:
            raise PoolUnfit(f"{self._directory}: {wrong.strerror}") from None

    def _keep(self, lock: HeldLock) -> str:
        """Hold this lock, and release the one before. Return its name."""
        if self._number is not None:
            lock.move_to(self._number)
        if self._lock is not None:
            self._lock.close()
        self._lock = lock
        return lock.path.name

    def release(self, *, delete: bool = False) -> None:
        """Release the lock; the next `hold` takes another name."""
        if self._lock is not None:
            self._lock.close(delete=delete)
            self._lock = None


class MappedPool:
    """The slots of one layout in the pool of `directory`, as far as they are mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool: PoolMap | None = None
        self._slots: ArenaMap | None = None

    def map(self, arena: Arena, pool_bytes: int) -> ArenaMap:
        """Return the slots of a pool of this size. Nothing reads or writes the slots that were mapped before. Raises
        PoolUnfit."""
        try:
            if self._pool is None or not self._pool.current:
                self.close()
                self._pool = PoolMap(self._directory / POOL)
        except OSError as wrong:
            raise PoolUnfit(f"{self._directory}: {wrong.strerror}") from None
        if self._pool.geometry.file_bytes != pool_bytes:
            raise PoolUnfit(
                f"{self._pool.path} has {self._pool.geometry.file_bytes} bytes, not the {pool_bytes} of kvbm's pool"
            )
        if self._slots is None or self._slots.arena != arena:
            if self._slots is not None:
                self._slots.close()
                self._slots = None
            self._slots = self._pool.arena(arena)
        return self._slots

    @property
    def file(self) -> tuple[int, int]:
        """The device and inode of the pool's file, which is mapped."""
        assert self._pool is not None
        return self._pool.about.st_dev, self._pool.about.st_ino

    def close(self) -> None:
        """Unmap the slots and the pool."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class PoolAttachment:
    """A `connector.Attachment` to the pool in `directory`, of the worker `instance`."""

    def __init__(self, directory: Path, instance: str, number: int | None = None, *, shared: bool = False) -> None:
        """`number` and `shared` are those of OwnerName."""
        self._directory = directory
        self._name = OwnerName(directory, instance, number, shared=shared)
        self._pool = MappedPool(directory)

    def place(self) -> AttachedPool:
        """Return what other processes of the engine need to map the same slots, which are mapped."""
        return AttachedPool(str(self._directory), self._name.held, self._pool.file)

    def hold(self) -> str:
        """Return the name under which this process holds a lock, as OwnerName does."""
        return self._name.hold()

    def map(self, attached: Attached) -> ArenaMap:
        """Return the slots that the kvbm named, as MappedPool does."""
        arena = Arena(attached.offset, attached.slot_bytes, attached.slots, attached.generations)
        return self._pool.map(arena, attached.pool_bytes)

    def close(self) -> None:
        """Unmap the pool and release the lock."""
        self._pool.close()
        self._name.release(delete=True)
