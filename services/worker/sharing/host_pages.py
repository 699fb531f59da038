"""The twin of `device_pages` in host memory: a memfd, which other processes map, and copies with memmove.

The memfd is sealed against shrinking, so that no reader can die of a page that is gone. One with IMMUTABLE cannot be
written any more, by any process: the kernel refuses that seal while it is mapped for writing, and each such mapping
afterwards.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

from services.worker.contracts.mover import Copy, Slots
from services.worker.sharing.memory import MapFailed
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.host_copier import GROUP_BYTES, FinishedCopies

PATH = "peer_memmove"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
IMMUTABLE = _SEALS | fcntl.F_SEAL_WRITE


def memory_file(name: str) -> int:
    """Return the descriptor of new host memory, empty, that can be sealed. Raise OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_memory(descriptor: int, seals: int) -> None:
    """Seal host memory for good. Raise OSError, with IMMUTABLE also while it is mapped for writing."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def memory_fault(descriptors: Sequence[int], size_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> str:
    """Return why descriptors are not host memory of at least `size_bytes` with these seals. Empty if they are."""
    if len(descriptors) != 1:
        return f"host memory has one descriptor; these are {len(descriptors)}"
    try:
        missing = seals & ~fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if missing & fcntl.F_SEAL_SHRINK:
            return "the memory could shrink while it is read"
        if missing:
            return "the memory could be written to while it is read"
        held_bytes = os.fstat(descriptors[0]).st_size
    except OSError as wrong:  # another kind of file
        return f"no memory: {wrong.strerror}"
    return "" if held_bytes >= size_bytes else f"the memory has {held_bytes} bytes, fewer than {size_bytes}"


class HostPages:
    """Zeros in host memory that other processes can map."""

    device = ""

    def __init__(self, size_bytes: int, descriptor: int = -1) -> None:
        """Make the memory, or map that of `descriptor`, which is this object's from then on. Pages are touched when
        they are first used. Raise OSError."""
        self.size_bytes = size_bytes
        self._descriptor = memory_file("headrace-peer") if descriptor < 0 else descriptor
        try:
            if descriptor < 0:
                os.ftruncate(self._descriptor, size_bytes)
                seal_memory(self._descriptor, _SEALS)
            self._mapping: mmap.mmap | None = mmap.mmap(self._descriptor, size_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        self.array = np.frombuffer(self._mapping, np.uint8)
        """All bytes, writable."""

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def descriptors(self) -> Sequence[int]:
        return [self._descriptor]

    def drop(self) -> None:
        """Give the memory back to the system. All bytes are zero afterwards, also for other processes."""
        assert self._mapping is not None
        self._mapping.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Let go of the memory; the mapping ends with the last view of `array`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.array, self._mapping = np.empty(0, np.uint8), None


class HostMapper:
    """Maps HostPages of other processes."""

    def map(self, descriptors: Sequence[int], size_bytes: int, device: str) -> HostMapping:
        if len(descriptors) != 1 or device:
            raise MapFailed(f"host memory has one descriptor and no GPU; these are {len(descriptors)} and {device!r}")
        if fault := memory_fault(descriptors, size_bytes):
            raise MapFailed(fault)
        try:
            return HostMapping(mmap.mmap(descriptors[0], size_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as wrong:
            raise MapFailed(str(wrong)) from wrong


class HostMapping:
    """Host memory of another process, which this process cannot write."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: mmap.mmap | None = memory
        self.address: int = np.frombuffer(memory, np.uint8).ctypes.data

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class SharedHostCopier:
    """A Copier from another process's host memory to this one's. Its copies have ended when `begin` returns."""

    duplex = False

    def __init__(self, theirs: BlockShape, own: BlockShape) -> None:
        assert (theirs.fragments, theirs.fragment_bytes) == (own.fragments, own.fragment_bytes)
        self._theirs, self.shape = theirs, own
        self.group_blocks = max(1, GROUP_BYTES // own.block_bytes)

    def attach(self, slots: Slots) -> None:
        """The sharer's slots are mapped already."""

    def detach(self) -> None: ...

    def prepare(self) -> bool:
        return False

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> FinishedCopies:
        assert loads, "shared blocks are only read"
        theirs, own = self._theirs, self.shape
        for copy in copies:
            origin, to = copy.pool_slot * theirs.stride_bytes, copy.device_slot * own.stride_bytes
            for source, target in zip(theirs.regions, own.regions, strict=True):
                ctypes.memmove(target + to, source + origin, own.fragment_bytes)
        return FinishedCopies({PATH: len(copies)})

    def differs(self, copies: Sequence[Copy]) -> list[bool]:  # noqa: ARG002 - see below
        raise AssertionError("shared blocks are not compared")

    def close(self) -> None: ...
