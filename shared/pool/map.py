"""Maps a kvbm's pool file into memory, for the kvbm and for the engines that it serves.

    PoolMap      the file: its header checked against its size, its generations mapped (to an engine: read-only)
    ArenaMap     one layout's slots, mapped by themselves, so that an engine can touch no others

A forked child does not inherit a mapping, since it would have no lock of its own. Nothing protects against the same
user cutting the file short while it is mapped: touching the missing part ends the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from shared.pool.format import HEADER_BYTES, Arena, PoolGeometry, PoolUnfit, parse
from shared.regular_file import ownership_fault

_GENERATIONS = (1 << 64) - 1
_MADV_POPULATE_WRITE = 23
"""The advice of Linux 5.14 that touches pages without changing them, and fails where a touch would raise a signal."""
_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, it lets other threads run meanwhile


class PoolMap:
    """One pool file. `grants`: whether this process is the kvbm, which alone writes generations."""

    def __init__(self, path: Path, *, grants: bool = False) -> None:
        """Raise PoolUnfit if the file is missing, open to other users, or not a pool."""
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
        """Whether the path still names the mapped file."""
        try:
            return os.path.samestat(self.path.lstat(), self.about)
        except FileNotFoundError:
            return False

    def arena(self, arena: Arena) -> ArenaMap:
        """Map a layout's slots. Raise PoolUnfit if they do not lie in this file."""
        self.geometry.check(arena)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        slots = _mapped(self.path, self.descriptor, arena.offset, arena.size_bytes, access)
        table = memoryview(self._tables)[arena.generations : arena.generations + 8 * arena.slots]
        return ArenaMap(arena, slots, table)

    def close(self) -> None:
        """Close the file; its arenas must be closed before."""
        self._tables.close()
        os.close(self.descriptor)


class ArenaMap:
    """The slots of one layout, by number. An invalid number raises PoolUnfit, since it comes from another process."""

    def __init__(self, arena: Arena, slots: mmap.mmap, table: memoryview) -> None:
        """`table` has the arena's generations, 8 bytes each."""
        self.arena = arena
        self._mapping = slots
        self._table = table
        self.bytes = memoryview(slots)
        """The bytes of all slots in order: uint8 of shape `slots` · `slot_bytes`, writable."""
        self._generations = table.cast("Q")

    def slot(self, slot: int) -> memoryview:
        """Return the bytes of one slot, with its padding. The caller must `release` them before `close`."""
        start = self._checked(slot) * self.arena.slot_bytes
        return self.bytes[start : start + self.arena.slot_bytes]

    def generation(self, slot: int) -> int:
        """Return how often the slot was granted for writing.

        If it is unchanged after a copy from the slot, the copy is good: kvbm raises it before it grants the slot.
        """
        return int(self._generations[self._checked(slot)])

    def generations(self, slots: bytes) -> bytes:
        """Return the generations of slots, packed as u64; `slots` are packed as u32. 256 of them take 4 µs, not 35."""
        numbers = np.frombuffer(slots, np.uint32)
        if numbers.size and int(numbers.max()) >= self.arena.slots:
            raise PoolUnfit(f"slot {numbers.max()} of an arena of {self.arena.slots}")
        return np.frombuffer(self._generations, np.uint64)[numbers].tobytes()

    def grant(self, slot: int) -> int:
        """Raise and return the generation of a slot that will be written. Only kvbm can: others map it read-only."""
        generation = (self.generation(slot) + 1) & _GENERATIONS
        self._generations[slot] = generation
        return generation

    def close(self) -> None:
        """Unmap the slots. Raise BufferError if a view of a slot is still in use; then the memory stays mapped."""
        self._generations.release()
        self._table.release()
        self.bytes.release()
        self._mapping.close()

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.arena.slots:
            raise PoolUnfit(f"slot {slot} of an arena of {self.arena.slots}")
        return slot


def touch(memory: memoryview) -> None:
    """Map every page of a memory of whole pages, without changing it.

    A copy into memory that the process has never touched takes about five times as long. This blocks for 0.2 s per GiB;
    other threads run meanwhile. Raise OSError if there is not enough memory, or (EINVAL) the kernel cannot do it.
    """
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.c_void_p(ctypes.addressof(first))
    if _libc.madvise(address, ctypes.c_size_t(memory.nbytes), _MADV_POPULATE_WRITE):
        wrong = ctypes.get_errno()
        raise OSError(wrong, os.strerror(wrong))


def open_pool(path: Path) -> int:
    """Open the file, and return its descriptor. Raise PoolUnfit if it is missing, or other users can open it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as wrong:
        raise PoolUnfit(f"{path}: {wrong.strerror}") from None
    if fault := ownership_fault(os.fstat(descriptor), "file", "open"):
        os.close(descriptor)
        raise PoolUnfit(f"{path} {fault}")
    return descriptor


def _geometry(path: Path, descriptor: int, file_bytes: int) -> PoolGeometry:
    try:
        return parse(os.pread(descriptor, HEADER_BYTES, 0), file_bytes)
    except PoolUnfit as wrong:
        raise PoolUnfit(f"{path}: {wrong}") from None


def _mapped(path: Path, descriptor: int, offset: int, size_bytes: int, access: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED, prot=access, offset=offset)
    except (OSError, ValueError) as wrong:  # ValueError: the file has become shorter meanwhile
        raise PoolUnfit(f"{path}: {size_bytes} bytes cannot be mapped: {wrong}") from None
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping
