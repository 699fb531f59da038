"""HostCopier: copies blocks between two pieces of host memory; CudaCopier's twin, for machines without a GPU.

`begin` has copied when it returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from services.worker.copies import Copy, Slots
from services.worker.transfer.block_shape import BlockShape


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
        assert self._slot_bytes, "not attached"
        size_bytes = self.shape.fragment_bytes
        for copy in copies:
            in_pool = self._pool_at + copy.pool_slot * self._slot_bytes
            for region in self.shape.regions:
                on_device = region + copy.device_slot * self.shape.stride_bytes
                to, source = (on_device, in_pool) if loads else (in_pool, on_device)
                ctypes.memmove(to, source, size_bytes)
                in_pool += size_bytes
        return Done()

    def close(self) -> None:
        self._memory = None


class Done:
    """A Pending that has ended."""

    def wait(self) -> None:
        return
