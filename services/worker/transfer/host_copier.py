"""HostCopier: copies blocks between two pieces of host memory; CudaCopier's twin, for machines without a GPU.

`begin` has copied when it returns.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence

from services.worker.mover import Copy, Slots
from services.worker.transfer.block_shape import BlockShape
from shared.pool.map import touch

PATH = "memmove"
GROUP_BYTES = 4 << 20
"""0.4 ms. Copies in groups of 1 MiB, of blocks of 0.7 MiB, took 1.13 times as long."""
PIECE_BYTES = 16 << 20
"""Of the pool, touched in one go (3 ms): a copy, or `detach`, waits no longer than that."""

_log = logging.getLogger(__name__)
_memcmp = ctypes.CDLL(None).memcmp  # other threads run meanwhile
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HostCopier:
    """A Copier; see the module."""

    duplex = False

    def __init__(self, shape: BlockShape, memory: object) -> None:
        """`shape` lies in `memory`, which is kept alive."""
        shape.validate()
        self.shape = shape
        self._memory: object | None = memory
        self.group_blocks = max(1, GROUP_BYTES // shape.block_bytes)
        self._slots: Slots | None = None
        self._pool_at = 0
        self._untouched = range(0)
        """Where the pieces of the pool that are yet to be touched begin."""

    @staticmethod
    def of(blocks: memoryview, block_bytes: int) -> HostCopier:
        """`blocks`: all of the device's slots, one behind the other; writable and contiguous."""
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
        """Touches its pages."""
        if self._untouched:
            assert self._slots is not None
            piece, self._untouched = self._untouched[0], self._untouched[1:]
            with self._slots.bytes[piece : piece + PIECE_BYTES] as memory:
                try:
                    touch(memory)
                except OSError as wrong:
                    # Its text alone: who keeps the exception keeps the pool mapped.
                    _log.warning("the pool's pages are not touched beforehand, copies will be slower: %s", str(wrong))
                    self._untouched = range(0)
        return bool(self._untouched)

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Done:
        size_bytes = self.shape.fragment_bytes
        for on_device, in_pool in self._places(copies):
            if loads:
                ctypes.memmove(on_device, in_pool, size_bytes)
            else:
                ctypes.memmove(in_pool, on_device, size_bytes)
        return Done({PATH: len(copies)})

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        size_bytes = self.shape.fragment_bytes
        return [any(_memcmp(*place, size_bytes) for place in self._places([copy])) for copy in copies]

    def close(self) -> None:
        self._memory = None

    def _places(self, copies: Sequence[Copy]) -> Iterator[tuple[int, int]]:
        """Where each fragment of each block lies on the device, and in the pool."""
        assert self._slots is not None
        slot_bytes, shape = self._slots.arena.slot_bytes, self.shape
        for copy in copies:
            in_pool = self._pool_at + copy.pool_slot * slot_bytes
            for region in shape.regions:
                yield region + copy.device_slot * shape.stride_bytes, in_pool
                in_pool += shape.fragment_bytes


class Done:
    """A Pending that has ended."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        self.paths = paths
        self.fallbacks: Mapping[str, int] = {}

    def wait(self) -> None:
        return
