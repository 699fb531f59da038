"""A kvbm's pool file in this process's memory, without copying: for the kvbm and for the engines that it serves.

    PoolMap      the file: its header checked against its size, its generations mapped (to an engine: read-only)
    ArenaMap     one layout's slots, mapped by themselves, so that an engine can touch nobody else's

A mapping is not inherited by a forked child, which would have no lock that speaks for it. What cannot be guarded
against is this very user cutting the file short while it is mapped: touching what is gone ends the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from shared.pool.format import HEADER_BYTES, Arena, Geometry, PoolUnfit, parse

_GENERATIONS = (1 << 64) - 1
_MADV_POPULATE_WRITE = 23
"""Linux 5.14. Touches without changing what is there, and fails where a touch would be a signal."""
_libc = ctypes.CDLL(None, use_errno=True)  # which lets other threads run meanwhile, as mmap.madvise does not


class PoolMap:
    """One pool file. `grants`: whether this process is the kvbm, which alone writes generations."""

    def __init__(self, path: Path, *, grants: bool = False) -> None:
        """Raises PoolUnfit where the file is not there, not this user's alone, or no pool."""
        self.path = path
        self.grants = grants
        self.descriptor = open_pool(path)
        try:
            self.about = os.fstat(self.descriptor)
            self.geometry = _geometry(path, self.descriptor, self.about.st_size)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if grants else 0)
            self._tables = _mapped(path, self.descriptor, 0, self.geometry.slots_at, access)
        except BaseException:
            os.close(self.descriptor)
            raise

    @property
    def current(self) -> bool:
        """Whether the path still leads to the file that is mapped."""
        try:
            return os.path.samestat(self.path.lstat(), self.about)
        except FileNotFoundError:
            return False

    def arena(self, arena: Arena) -> ArenaMap:
        """Maps a layout's slots. Raises PoolUnfit where they do not lie in this file."""
        self.geometry.check(arena)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        slots = _mapped(self.path, self.descriptor, arena.offset, arena.size_bytes, access)
        table = memoryview(self._tables)[arena.generations : arena.generations + 8 * arena.slots]
        return ArenaMap(arena, slots, table)

    def close(self) -> None:
        """Arenas are closed first."""
        self._tables.close()
        os.close(self.descriptor)


class ArenaMap:
    """The slots of one layout. A slot is named by its number; one that the arena does not have raises PoolUnfit,
    since such numbers come from another process."""

    def __init__(self, arena: Arena, slots: mmap.mmap, table: memoryview) -> None:
        """`table`: the arena's generations, 8 bytes each."""
        self.arena = arena
        self._mapping = slots
        self._table = table
        self.bytes = memoryview(slots)
        """All slots, one behind the other: uint8 of `slots` · `slot_bytes`, writable."""
        self._generations = table.cast("Q")

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot, its padding included. Whoever keeps it must `release` it before `close`."""
        start = self._checked(slot) * self.arena.slot_bytes
        return self.bytes[start : start + self.arena.slot_bytes]

    def generation(self, slot: int) -> int:
        """How often the slot was granted for writing. Read after copying from the slot, it tells whether the copy is
        good: the kvbm raises it before it tells a writer of the slot."""
        return int(self._generations[self._checked(slot)])

    def generations(self, slots: bytes) -> bytes:
        """Of slots packed as u32, packed as u64: 256 of them in 4 µs instead of 35."""
        numbers = np.frombuffer(slots, np.uint32)
        if numbers.size and int(numbers.max()) >= self.arena.slots:
            raise PoolUnfit(f"slot {numbers.max()} of an arena of {self.arena.slots}")
        return np.frombuffer(self._generations, np.uint64)[numbers].tobytes()

    def grant(self, slot: int) -> int:
        """The slot is about to be written; its new generation. For the kvbm alone: others' tables are read-only."""
        generation = (self.generation(slot) + 1) & _GENERATIONS
        self._generations[slot] = generation
        return generation

    def close(self) -> None:
        """Raises BufferError where somebody still has a view of a slot: the memory stays mapped then."""
        self._generations.release()
        self._table.release()
        self.bytes.release()
        self._mapping.close()

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.arena.slots:
            raise PoolUnfit(f"slot {slot} of an arena of {self.arena.slots}")
        return slot


def touch(memory: memoryview) -> None:
    """Maps every page of whole pages of a mapping, and changes none: a copy into memory that its process has never
    touched takes about five times as long. Blocking, 0.2 s a GiB; other threads run meanwhile.

    Raises OSError where there is no memory for it, or (EINVAL) the kernel cannot.
    """
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.c_void_p(ctypes.addressof(first))
    if _libc.madvise(address, ctypes.c_size_t(memory.nbytes), _MADV_POPULATE_WRITE):
        wrong = ctypes.get_errno()
        raise OSError(wrong, os.strerror(wrong))


def open_pool(path: Path) -> int:
    """A descriptor of the file, which is this user's alone. Raises PoolUnfit."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as wrong:
        raise PoolUnfit(f"{path}: {wrong.strerror}") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        os.close(descriptor)
        raise PoolUnfit(f"{path}: not a file that belongs to this user and is open to nobody else")
    return descriptor


def _geometry(path: Path, descriptor: int, file_bytes: int) -> Geometry:
    try:
        return parse(os.pread(descriptor, HEADER_BYTES, 0), file_bytes)
    except PoolUnfit as wrong:
        raise PoolUnfit(f"{path}: {wrong}") from None


def _mapped(path: Path, descriptor: int, offset: int, size_bytes: int, access: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=access, offset=offset)
    except (OSError, ValueError) as wrong:  # ValueError: the file has been cut since we looked
        raise PoolUnfit(f"{path}: {size_bytes} bytes cannot be mapped: {wrong}") from None
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping
