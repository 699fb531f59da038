"""The pool file that engines share, and which engines may be using it. Only a kvbm makes the file; it copies nothing.

    DIR/lock, DIR/owners    shared.pool.lock
    DIR/pool                shared.pool.format; mode 0600

                          ┌─ fits ─────────────────▶ adopted: the same memory and generations as before
    start ── DIR/pool ────┤
                          └─ missing, or unfit ────▶ a new file, made under another name and renamed when complete

An adopted file's generations go on, so that a slot granted by the former kvbm can be distinguished from the same
slot granted by this one. The contents of its slots are unknown, and `survivors` may still be writing to them.

A file that was replaced is never used again. Living engines may map it and write to it: its memory is freed when they
attach to the new one, or end.

Its memory is not write-combined: that copies no faster to a GPU (55.4 GB/s both ways on an H200), and CPUs read it
slowly.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from services.kvbm.pool.arenas import Arenas
from services.kvbm.pool.owners import OwnerLocks
from shared.errors import ConfigError
from shared.machine_memory import memory_limits, memory_sizes
from shared.pool.format import PAGE_BYTES, PoolGeometry, PoolUnfit, usable
from shared.pool.lock import POOL, HeldLock, LockTaken, check_directory, hold_directory
from shared.pool.map import ArenaMap, PoolMap

_log = logging.getLogger(__name__)


class ArenaAssignment(Struct, frozen=True):
    """The slots of a layout, and the layout that had them until now."""

    slots: ArenaMap
    former_layout: str | None


class HostPool:
    """The pool of one kvbm. Made by `open`."""

    def __init__(
        self, pool: PoolMap, lock: HeldLock, owners: OwnerLocks, arenas: int, *, adopted: bool, closing: ExitStack
    ) -> None:
        self.path = pool.path
        self.geometry = pool.geometry
        self.lock = lock
        """The lock of the directory; for reading only."""
        self.owners = owners
        self.adopted = adopted
        """Whether the file existed before this process."""
        self.survivors = owners.watched if adopted else frozenset[str]()
        """Engines that were alive when the file was opened. They may write to any slot until they attach again or
        die."""
        self.arenas = Arenas(arenas)
        self._pool = pool
        self._placed: dict[str, ArenaMap] = {}
        self._closing = closing

    @staticmethod
    def open(directory: Path, size_bytes: int, arenas: int = 1, *, instance: str = "") -> HostPool:
        """Open the pool under the directory's lock, in the name of `instance`; `size_bytes` is rounded down to what a
        pool can have. Blocks for a moment.

        Raise ConfigError if the machine has no room for the size, or the size none for the arenas; if another
        kvbm runs here; or if the directory cannot be used."""
        with ExitStack() as closing:
            try:
                size_bytes = usable(size_bytes)
                if not directory.is_absolute():
                    raise ConfigError(
                        f"{directory}: pool.directory must be an absolute path, because workers name the same directory"
                    )
                if arenas < 1:
                    raise ConfigError(f"pool.arenas is {arenas}, and must be at least 1")
                PoolGeometry.of(size_bytes).arena(0, arenas, PAGE_BYTES)
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_directory(directory)
                lock = hold_directory(directory, instance)
                closing.callback(lock.close)
                owners = OwnerLocks(directory)
                closing.callback(owners.close)
                owners.poll()
                if owners.full:
                    raise ConfigError(
                        f"{directory}: {len(owners.watched)} engines live here, more cannot be watched: end some"
                    )
                pool, adopted = _open_file(directory / POOL, size_bytes, owners.watched)
                closing.callback(pool.close)
            except LockTaken as taken:
                holder = taken.note.partition(" ")[0] or "unknown"
                raise ConfigError(
                    f"{directory}: another kvbm runs here, process {holder}: end it, or set pool.directory"
                ) from None
            except PoolUnfit as wrong:
                raise ConfigError(str(wrong)) from None
            except OSError as wrong:
                raise ConfigError(f"{wrong.filename or directory}: {wrong.strerror}") from None
            return HostPool(pool, lock, owners, arenas, adopted=adopted, closing=closing.pop_all())

    @property
    def reserved(self) -> bool:
        """Whether all memory of the file is made. Before that no slot may be granted: see `prefault`."""
        return os.fstat(self._pool.descriptor).st_blocks * 512 >= self.geometry.file_bytes

    @property
    def descriptor(self) -> int:
        """The open file, for `Prefault`; valid until `close`."""
        return self._pool.descriptor

    def assign_arena(self, layout: str, block_bytes: int, in_use: Collection[str]) -> ArenaAssignment:
        """Assign slots for blocks of `block_bytes` to the layout with this digest; asked again, return the same ones.

        `in_use` are the layouts that living engines use or that are being copied; others may lose their arena. Raises
        NoArena, and PoolUnfit where an arena has no room for such a block or cannot be mapped; nothing has changed
        then."""
        arena = self.geometry.arena(0, self.arenas.count, block_bytes)
        if layout in self._placed:
            there = self._placed[layout]
            if there.arena.slot_bytes != arena.slot_bytes:
                raise PoolUnfit(f"layout {layout}: slots of {there.arena.slot_bytes} bytes, not {arena.slot_bytes}")
            self.arenas.assign(layout, in_use)
            return ArenaAssignment(there, None)
        given = self.arenas.assign(layout, in_use)
        try:
            slots = self._pool.arena(self.geometry.arena(given.index, self.arenas.count, block_bytes))
        except PoolUnfit:  # the system allows no further mapping
            self.arenas.undo_assign(layout, given)
            raise
        if given.former_layout is not None:
            self._placed.pop(given.former_layout).close()
        self._placed[layout] = slots
        return ArenaAssignment(slots, given.former_layout)

    def close(self) -> None:
        """Close the pool. The file stays, for the next kvbm here to adopt."""
        for slots in self._placed.values():
            slots.close()
        self._placed.clear()
        self._closing.close()


def _open_file(path: Path, size_bytes: int, survivors: Collection[str]) -> tuple[PoolMap, bool]:
    """Map the file. Return it, and whether it was adopted. Raise ConfigError, PoolUnfit, OSError."""
    try:
        there_bytes: int | None = path.lstat().st_blocks * 512
    except FileNotFoundError:
        there_bytes = None
    check_memory(path.parent, size_bytes, there_bytes or 0)
    if there_bytes is not None:
        try:
            return _adopt(path, size_bytes), True
        except PoolUnfit as wrong:
            if survivors:  # the memory of the former file is in use until they attach to the new one
                _check_memory_with_survivors(path, size_bytes, wrong, survivors)
            _log.warning("%s; a new file takes its place", wrong)
    _make(path, size_bytes)
    return PoolMap(path, grants=True), False


def _check_memory_with_survivors(path: Path, size_bytes: int, wrong: PoolUnfit, survivors: Collection[str]) -> None:
    try:
        check_memory(path.parent, size_bytes, 0)
    except ConfigError as full:
        living = ", ".join(sorted(survivors))
        raise ConfigError(f"{wrong}; no room for a new one while these engines live: {living}: {full}") from None


def _adopt(path: Path, size_bytes: int) -> PoolMap:
    pool = PoolMap(path, grants=True)
    if pool.geometry.file_bytes != size_bytes:
        pool.close()
        raise PoolUnfit(f"{path}: a pool of {pool.geometry.file_bytes} bytes, not {size_bytes}")
    return pool


def _make(path: Path, size_bytes: int) -> None:
    aside = path.with_name("pool.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size_bytes)
        os.pwrite(descriptor, PoolGeometry.of(size_bytes).header(), 0)
        if os.major(os.fstat(descriptor).st_dev):
            _log.warning("%s lies on a disk, so all blocks in memory are written to it: use a tmpfs", path)
    finally:
        os.close(descriptor)
    aside.replace(path)


def check_memory(directory: Path, size_bytes: int, there_bytes: int) -> None:
    """Raise ConfigError if a pool of `size_bytes` in `directory` has no room. `there_bytes` of it are in memory
    already, or will be freed for it.

    Memory is touched after this check: if a file system or a container's limit has no room for a page, the process that
    touches it ends (by SIGBUS, or by the kernel's out-of-memory killer), and that may be an engine."""
    missing_bytes, memory = max(0, size_bytes - there_bytes), memory_sizes()
    rooms: list[tuple[str, int | None, int]] = [
        ("this machine's memory", memory["MemTotal"], size_bytes),
        ("this process's memory limit", min(memory_limits(), default=None), size_bytes),
        (f"the free space of {directory}", _free_bytes(directory), missing_bytes),
        ("the memory that is available now", memory.get("MemAvailable"), missing_bytes),
    ]
    for what, room_bytes, needed_bytes in rooms:
        if room_bytes is not None and needed_bytes > room_bytes:
            raise ConfigError(
                f"a pool of {_size(size_bytes)} needs {_size(needed_bytes)}, and {what} is {_size(room_bytes)}: lower "
                "pool.size_bytes (--kvbm-bytes of `headrace up`)"
            )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.1f} MiB"


def _free_bytes(directory: Path) -> int | None:
    about = os.statvfs(directory)
    return about.f_bavail * about.f_frsize if about.f_blocks else None  # a tmpfs without a limit reports 0 blocks
