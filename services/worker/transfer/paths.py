"""The paths on which a group of blocks can be copied between the device's slots and one-piece slots of the pool.

    rows        one copy for each block, 2-D if it has fragments         DMA; needs evenly spaced fragments
    batch       all fragments of a group in one call                     DMA; any spacing
    staged      a kernel gathers blocks into a ring on the device,       DMA of whole blocks
                and each is copied as one piece; loads the other way
    direct      a kernel moves the fragments itself              multiprocessors; for the parts of ranks, whose
                                                                 fragments lie apart in a slot, too small for DMA
    pageable    like rows, or fragment by fragment                       for slots that cannot be pinned

All paths give the same bytes. The addresses and slots that a path passes to CUDA lie in arrays that are made once: CUDA
reads them during the call, and no copy allocates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from services.worker.contracts.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import ANYWHERE, Stream
from services.worker.transfer.fragment_kernel import MOST_BLOCKS, FragmentKernel
from services.worker.transfer.memcpy_batch import MemcpyBatch
from services.worker.transfer.staging_ring import StagingRing

PIECES, PIECE_BYTES = 4, 2 << 20
"""A group that fits one segment is cut into PIECES, so that the kernel works on one piece while another is copied. A
piece has at least PIECE_BYTES, because smaller ones cost more than they save."""


class SlotArray(Struct, frozen=True):
    """Slots back to back, in pinned host memory or on a device; the path `pageable` also takes memory not pinned."""

    at: int
    """Where the first fragment of slot 0 lies."""
    slot_bytes: int
    pitch_bytes: int = 0
    """The distance between the fragments of a slot. 0 means that they lie back to back."""


class TransferPath(Protocol):
    """A way to copy groups. It belongs to one direction's thread."""

    def issue(self, copies: Sequence[Copy], pool: SlotArray, *, loads: bool, on: Stream) -> Stream:
        """Enqueue copies, after all work on `on`, and return the stream on which the last of them ends.

        Raise DeviceFailed or CUDA's errors; some of the copies may be under way then.
        """
        ...


class RowsPath:
    """The path `rows`: one copy for each block."""

    def __init__(self, shape: BlockShape) -> None:
        self._shape = shape

    def issue(self, copies: Sequence[Copy], pool: SlotArray, *, loads: bool, on: Stream) -> Stream:
        shape, stream = self._shape, on.ptr
        size_bytes, pitch = shape.fragment_bytes, shape.pitch_bytes
        pool_pitch = pool.pitch_bytes or size_bytes
        for copy in copies:
            in_pool = pool.at + copy.pool_slot * pool.slot_bytes
            offset = copy.device_slot * shape.stride_bytes
            if pitch is None or shape.fragments == 1:
                for region in shape.regions:
                    to, source = (region + offset, in_pool) if loads else (in_pool, region + offset)
                    runtime.memcpyAsync(to, source, size_bytes, ANYWHERE, stream)
                    in_pool += pool_pitch
            elif loads:
                at = shape.regions[0] + offset
                runtime.memcpy2DAsync(at, pitch, in_pool, pool_pitch, size_bytes, shape.fragments, ANYWHERE, stream)
            else:
                at = shape.regions[0] + offset
                runtime.memcpy2DAsync(in_pool, pool_pitch, at, pitch, size_bytes, shape.fragments, ANYWHERE, stream)
        return on


class BatchPath:
    """The path `batch`: one call for all fragments of a group."""

    def __init__(self, shape: BlockShape, memcpy: MemcpyBatch) -> None:
        self._shape = shape
        self._memcpy = memcpy
        self._most = group_blocks(shape.block_bytes)
        self._places = _Places(self._most)
        self._regions = np.array(shape.regions, np.int64)
        self._numbers = np.arange(shape.fragments, dtype=np.int64)
        self._in_pool = np.empty((self._most, shape.fragments), np.int64)
        self._on_device = np.empty((self._most, shape.fragments), np.int64)
        self._sizes = np.full(self._most * shape.fragments, shape.fragment_bytes, np.uint64)

    def issue(self, copies: Sequence[Copy], pool: SlotArray, *, loads: bool, on: Stream) -> Stream:
        for first in range(0, len(copies), self._most):
            blocks, slots = self._places.of(copies[first : first + self._most], pool)
            in_pool, on_device = self._in_pool[: len(slots)], self._on_device[: len(slots)]
            steps = self._numbers * (pool.pitch_bytes or self._shape.fragment_bytes)
            np.add(blocks[:, None], steps, out=in_pool)
            slots *= self._shape.stride_bytes
            np.add(slots[:, None], self._regions, out=on_device)
            to, source = (on_device, in_pool) if loads else (in_pool, on_device)
            self._memcpy.copy(to, source, self._sizes, on)
        return on


class StagedPath:
    """The path `staged`: a kernel and a ring on the device, and one copy for each block."""

    def __init__(
        self, shape: BlockShape, kernel: FragmentKernel, ring: StagingRing, memcpy: MemcpyBatch | None
    ) -> None:
        """`memcpy` copies in one call: pieces of 256 KiB reach 53 GB/s with it, and 34 GB/s with a call each."""
        self._block_bytes = shape.block_bytes
        self._kernel = kernel
        self._ring = ring
        self._memcpy = memcpy
        self._most = min(ring.segment_blocks, MOST_BLOCKS)
        self._least = -(-PIECE_BYTES // shape.block_bytes)
        self._places = _Places(self._most)
        self._steps = np.arange(self._most, dtype=np.int64) * shape.block_bytes
        self._staged = np.empty(self._most, np.int64)
        self._sizes = np.full(self._most, shape.block_bytes, np.uint64)

    def issue(self, copies: Sequence[Copy], pool: SlotArray, *, loads: bool, on: Stream) -> Stream:
        ring = self._ring
        few = len(copies) <= self._most
        most = min(self._most, max(self._least, -(-len(copies) // PIECES))) if few else self._most
        for first in range(0, len(copies), most):
            blocks, slots = self._places.of(copies[first : first + most], pool)
            segment = ring.next_segment(copying_first=loads, on=on)
            staged = np.add(self._steps[: len(slots)], segment.at, out=self._staged[: len(slots)])
            if loads:
                self._copy(staged, blocks, on)
                segment.hand_over(on, ring.kernels)
            self._kernel.launch(staged, slots, loads=loads, on=ring.kernels)
            if not loads:
                segment.hand_over(ring.kernels, on)
                self._copy(blocks, staged, on)
            segment.free(ring.kernels if loads else on)
        return ring.kernels if loads else on

    def _copy(self, to: np.ndarray, source: np.ndarray, on: Stream) -> None:
        if self._memcpy is not None:
            self._memcpy.copy(to, source, self._sizes, on)
            return
        for at, begin in zip(to.tolist(), source.tolist(), strict=True):
            runtime.memcpyAsync(at, begin, self._block_bytes, ANYWHERE, on.ptr)


class DirectPath:
    """The path `direct`: a kernel that reads and writes the slots in pinned memory."""

    def __init__(self, kernel: FragmentKernel) -> None:
        self._kernel = kernel
        self._places = _Places(MOST_BLOCKS)

    def issue(self, copies: Sequence[Copy], pool: SlotArray, *, loads: bool, on: Stream) -> Stream:
        for first in range(0, len(copies), MOST_BLOCKS):
            blocks, slots = self._places.of(copies[first : first + MOST_BLOCKS], pool)
            self._kernel.launch(blocks, slots, loads=loads, on=on)
        return on


class _Places:
    """Computes where a group's blocks lie."""

    def __init__(self, most: int) -> None:
        self._blocks = np.empty(most, np.int64)
        self._slots = np.empty(most, np.int64)

    def of(self, copies: Sequence[Copy], pool: SlotArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses in the pool and the device's slots, both int64 (copies,), valid until the next call."""
        blocks, slots = self._blocks[: len(copies)], self._slots[: len(copies)]
        blocks[:] = [copy.pool_slot for copy in copies]
        blocks *= pool.slot_bytes
        blocks += pool.at
        slots[:] = [copy.device_slot for copy in copies]
        return blocks, slots
