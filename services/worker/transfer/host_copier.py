"""HostCopier: copies blocks between two pieces of host memory; CudaCopier's twin, for machines without a GPU.

`begin` has copied when it returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

from services.worker.copies import Copy, Slots
from services.worker.transfer.block_shape import BlockShape

PATH = "memmove"

_memcmp = ctypes.CDLL(None).memcmp  # other threads run meanwhile
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class HostCopier:
    """A Copier; see the module."""

    def __init__(self, shape: BlockShape, memory: object) -> None:
        """`shape` lies in `memory`, which is kept alive."""
        shape.validate()
        self.shape = shape
        self._memory: object | None = memory
        self._pool_at = 0
        self._slot_bytes = 0

    def attach(self, slots: Slots) -> None:
        self._pool_at = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
        self._slot_bytes = slots.arena.slot_bytes

    def detach(self) -> None:
        self._slot_bytes = 0

    def prepare(self) -> bool:
        return False

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> Done:
        for copy in copies:
            for on_device, in_pool in self._places(copy):
                to, source = (on_device, in_pool) if loads else (in_pool, on_device)
                ctypes.memmove(to, source, self.shape.fragment_bytes)
        return Done({PATH: len(copies)})

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        size_bytes = self.shape.fragment_bytes
        return [any(_memcmp(*place, size_bytes) for place in self._places(copy)) for copy in copies]

    def close(self) -> None:
        self._memory = None

    def _places(self, copy: Copy) -> Iterator[tuple[int, int]]:
        """Where each fragment lies on the device, and in the pool."""
        assert self._slot_bytes, "not attached"
        in_pool = self._pool_at + copy.pool_slot * self._slot_bytes
        for region in self.shape.regions:
            yield region + copy.device_slot * self.shape.stride_bytes, in_pool
            in_pool += self.shape.fragment_bytes


class Done:
    """A Pending that has ended."""

    def __init__(self, paths: Mapping[str, int]) -> None:
        self.paths = paths
        self.fallbacks: Mapping[str, int] = {}

    def wait(self) -> None:
        return
