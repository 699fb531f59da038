"""HostCopier: copies blocks between two pieces of host memory. It is CudaCopier's twin for machines without a GPU.

Its copies have ended when `begin` returns.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence

from services.worker.contracts.mover import Copy, Slots
from services.worker.transfer.block_shape import BlockShape, SlotPart
from shared.pool.map import touch

PATH = "memmove"
GROUP_BYTES = 4 << 20
"""The size of a group: 0.4 ms. In groups of 1 MiB, copies of 0.7 MiB blocks took 1.13 times as long."""
PIECE_BYTES = 16 << 20
"""How much of the pool is touched at once (3 ms). A copy or `detach` waits no longer than that."""

_log = logging.getLogger(__name__)
_memcmp = ctypes.CDLL(None).memcmp  # other threads run meanwhile
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HostCopier:
    """A Copier between two pieces of host memory."""

    duplex = False

    def __init__(self, shape: BlockShape, memory: object, part: SlotPart | None = None) -> None:
        """Copy blocks of `shape`, which lies in `memory`; the copier keeps `memory` alive. `part` says where their
        fragments lie in the pool's slots, if they are a part of those."""
        shape.validate()
        self.shape = shape
        self._part = part or SlotPart(0, shape.fragment_bytes, shape.block_bytes)
        self._memory: object | None = memory
        self.group_blocks = max(1, GROUP_BYTES // shape.block_bytes)
        self._slots: Slots | None = None
        self._pool_at = 0
        self._untouched = range(0)
        """Offsets of the pieces of the pool that are still to be touched."""

    @staticmethod
    def over(blocks: memoryview, block_bytes: int) -> HostCopier:
        """Return a copier over `blocks`: all of the device's slots back to back, writable and contiguous."""
        at = ctypes.addressof(ctypes.c_char.from_buffer(blocks))
        return HostCopier(BlockShape.contiguous(at, block_bytes, blocks.nbytes // block_bytes), blocks)

    def attach(self, slots: Slots) -> None:
        self._slots = slots
        self._pool_at = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
        self._untouched = range(0, slots.bytes.nbytes, PIECE_BYTES)

    def detach(self) -> None:
        self._slots = None
        self._untouched = range(0)

    def prepare(self) -> bool:
        """Touch the pages of the pool's next piece."""
        if self._untouched:
            assert self._slots is not None
            piece, self._untouched = self._untouched[0], self._untouched[1:]
            with self._slots.bytes[piece : piece + PIECE_BYTES] as memory:
                try:
                    touch(memory)
                except OSError as wrong:
                    # Log the text only: a handler that keeps the exception would keep the pool mapped.
                    _log.warning("the pool's pages cannot be touched beforehand, so copies are slower: %s", str(wrong))
                    self._untouched = range(0)
        return bool(self._untouched)

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> FinishedCopies:
        size_bytes = self.shape.fragment_bytes
        for on_device, in_pool in self._places(copies):
            if loads:
                ctypes.memmove(on_device, in_pool, size_bytes)
            else:
                ctypes.memmove(in_pool, on_device, size_bytes)
        return FinishedCopies({PATH: len(copies)})

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        size_bytes = self.shape.fragment_bytes
        return [any(_memcmp(*place, size_bytes) for place in self._places([copy])) for copy in copies]

    def close(self) -> None:
        self._memory = None

    def _places(self, copies: Sequence[Copy]) -> Iterator[tuple[int, int]]:
        """Yield the address of each fragment of each block on the device, and that in the pool."""
        assert self._slots is not None
        slot_bytes, shape = self._slots.arena.slot_bytes, self.shape
        for copy in copies:
            in_pool = self._pool_at + copy.pool_slot * slot_bytes + self._part.first_bytes
            for region in shape.regions:
                yield region + copy.device_slot * shape.stride_bytes, in_pool
                in_pool += self._part.pitch_bytes


class FinishedCopies:
    """A `Pending` whose copies have ended."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        self.paths = paths
        self.fallbacks: Mapping[str, int] = {}

    def wait(self) -> None:
        return
