"""The ways a group of blocks can take between the device's slots and the pool's.

    rows        a copy a block, 2-D where it has fragments               DMA; fragments evenly spaced
    batch       all fragments of a group in one call                     DMA; any spacing
    staged      a kernel gathers blocks into a ring on the device,       DMA, of whole blocks
                and each goes over as one copy; loads the other way
    zero_copy   a kernel reads or writes the pool itself                 slows what computes beside it 1.4 to 5.4 times
    pageable    like rows, fragment by fragment if need be               slots that cannot be pinned

All give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from services.worker.copies import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.cuda import DEVICE_TO_HOST, HOST_TO_DEVICE, Stream
from services.worker.transfer.fragment_kernel import MOST_BLOCKS, FragmentKernel
from services.worker.transfer.memcpy_batch import MemcpyBatch
from services.worker.transfer.staging_ring import StagingRing

ZERO_COPY_MULTIPROCESSORS = 8
"""Enough for the link; more slow others for nothing."""


class Host(Struct, frozen=True):
    """Slots in host memory."""

    at: int
    slot_bytes: int


class Path(Protocol):
    """Belongs to one direction's thread."""

    def issue(self, copies: Sequence[Copy], host: Host, *, loads: bool, on: Stream) -> Stream:
        """Hands them over. They are made when the stream that is returned has come so far."""
        ...


class Rows:
    """See the module."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape

    def issue(self, copies: Sequence[Copy], host: Host, *, loads: bool, on: Stream) -> Stream:
        shape, stream = self._shape, on.ptr
        kind = HOST_TO_DEVICE if loads else DEVICE_TO_HOST
        size_bytes, pitch = shape.fragment_bytes, shape.pitch_bytes
        for copy in copies:
            in_pool = host.at + copy.pool_slot * host.slot_bytes
            offset = copy.device_slot * shape.stride_bytes
            if pitch is None or shape.fragments == 1:
                for region in shape.regions:
                    to, source = (region + offset, in_pool) if loads else (in_pool, region + offset)
                    runtime.memcpyAsync(to, source, size_bytes, kind, stream)
                    in_pool += size_bytes
            elif loads:
                on_device = shape.regions[0] + offset
                runtime.memcpy2DAsync(on_device, pitch, in_pool, size_bytes, size_bytes, shape.fragments, kind, stream)
            else:
                on_device = shape.regions[0] + offset
                runtime.memcpy2DAsync(in_pool, size_bytes, on_device, pitch, size_bytes, shape.fragments, kind, stream)
        return on


class Batched:
    """See the module."""

    def __init__(self, shape: BlockShape, memcpy: MemcpyBatch) -> None:
        self._shape = shape
        self._memcpy = memcpy
        self._regions = np.array(shape.regions, np.uint64)
        self._steps = np.arange(shape.fragments, dtype=np.uint64) * np.uint64(shape.fragment_bytes)

    def issue(self, copies: Sequence[Copy], host: Host, *, loads: bool, on: Stream) -> Stream:
        pool, slots = places(copies, host)
        in_pool = (pool.astype(np.uint64)[:, None] + self._steps).reshape(-1)
        offsets = slots.astype(np.uint64) * np.uint64(self._shape.stride_bytes)
        on_device = (offsets[:, None] + self._regions).reshape(-1)
        sizes = np.full(len(in_pool), self._shape.fragment_bytes, np.uint64)
        to, source = (on_device, in_pool) if loads else (in_pool, on_device)
        self._memcpy.copy(to, source, sizes, on)
        return on


class Staged:
    """See the module."""

    def __init__(
        self, shape: BlockShape, kernel: FragmentKernel, ring: StagingRing, memcpy: MemcpyBatch | None
    ) -> None:
        """`memcpy`: copies of 256 KiB go at 53 GB/s in one call, at 34 in one call each."""
        self._shape = shape
        self._kernel = kernel
        self._ring = ring
        self._memcpy = memcpy

    def issue(self, copies: Sequence[Copy], host: Host, *, loads: bool, on: Stream) -> Stream:
        ring = self._ring
        most = min(ring.segment_blocks, MOST_BLOCKS)
        for first in range(0, len(copies), most):
            pool, slots = places(copies[first : first + most], host)
            segment = ring.next(copying_first=loads, on=on)
            staged = segment.at + np.arange(len(slots), dtype=np.int64) * self._shape.block_bytes
            if loads:
                self._copy(staged, pool, HOST_TO_DEVICE, on)
                segment.hand_over(on, ring.kernels)
            self._kernel.launch(staged, slots, loads=loads, on=ring.kernels, multiprocessors=ring.multiprocessors)
            if not loads:
                segment.hand_over(ring.kernels, on)
                self._copy(pool, staged, DEVICE_TO_HOST, on)
            segment.free(ring.kernels if loads else on)
        return ring.kernels if loads else on

    def _copy(self, to: np.ndarray, source: np.ndarray, kind: int, on: Stream) -> None:
        size_bytes, stream = self._shape.block_bytes, on.ptr
        if self._memcpy is not None:
            sizes = np.full(len(to), size_bytes, np.uint64)
            self._memcpy.copy(to.astype(np.uint64), source.astype(np.uint64), sizes, on)
            return
        for at, begin in zip(to.tolist(), source.tolist(), strict=True):
            runtime.memcpyAsync(at, begin, size_bytes, kind, stream)


class ZeroCopy:
    """See the module."""

    def __init__(self, kernel: FragmentKernel) -> None:
        self._kernel = kernel

    def issue(self, copies: Sequence[Copy], host: Host, *, loads: bool, on: Stream) -> Stream:
        for first in range(0, len(copies), MOST_BLOCKS):
            pool, slots = places(copies[first : first + MOST_BLOCKS], host)
            self._kernel.launch(pool, slots, loads=loads, on=on, multiprocessors=ZERO_COPY_MULTIPROCESSORS)
        return on


def places(copies: Sequence[Copy], host: Host) -> tuple[np.ndarray, np.ndarray]:
    """Both int64 (copies,): the addresses in host memory, and the device's slots."""
    pool = np.array([copy.pool_slot for copy in copies], np.int64) * host.slot_bytes + host.at
    return pool, np.array([copy.device_slot for copy in copies], np.int64)
