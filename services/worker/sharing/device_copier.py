"""SharedDeviceCopier: copies blocks from another process's device memory into this process's.

    rows      one copy a block, 2-D if it has fragments                      DMA; needs evenly spaced fragments
    batch     all fragments of a group in one call                           DMA; any spacing
    kernel    threads read the other GPU's memory and write their own        multiprocessors; any spacing

The receiver copies, because it knows when it has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.contracts.mover import Copy, Slots
from services.worker.sharing.share_kernel import MOST_BLOCKS, MULTIPROCESSORS, ShareKernel
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.cuda import ANYWHERE, Event, Stream, new_stream, translated_errors, use_device
from services.worker.transfer.cuda_copier import InFlight
from services.worker.transfer.memcpy_batch import MemcpyBatch, load_memcpy_batch

SharePath = Literal["rows", "batch", "kernel"]
GROUP_BYTES = 256 << 20
"""The size of a group: 0.7 ms of NVLink between two H200s."""
GROUP_BLOCKS = 256
"""The most blocks in a group."""
SPIN_BYTES = 128 << 20
"""Up to this many bytes, a thread spins until copies end: 0.35 ms of NVLink. Waking up takes 35 to 80 µs."""


class SharedDeviceCopier:
    """A Copier for one GPU."""

    duplex = False

    def __init__(
        self,
        theirs: BlockShape,
        own: BlockShape,
        device: int,
        *,
        path: SharePath | None = None,
        streams: int = 1,
        multiprocessors: int = MULTIPROCESSORS,
    ) -> None:
        """Copy on `path`; None takes the best one that there is for these blocks. Raise DeviceFailed.

        A group's copies are spread over `streams`, which gained nothing between two H100s; the kernel has one.
        """
        assert (theirs.fragments, theirs.fragment_bytes) == (own.fragments, own.fragment_bytes)
        self.group_blocks = max(1, min(GROUP_BYTES // own.block_bytes, GROUP_BLOCKS))
        self._device = device
        self.shape = own
        use_device(device)
        memcpy = load_memcpy_batch()
        self.path: SharePath = path or best_path(own.fragments, batch=memcpy is not None)
        with translated_errors():
            self._streams = [new_stream() for _ in range(1 if self.path == "kernel" else streams)]
        self._issuer: _Issuer
        if self.path == "kernel":
            self._issuer = _Kernel(ShareKernel(theirs, own, multiprocessors))
        elif self.path == "batch":
            assert memcpy is not None, "this driver has no batches of copies"
            self._issuer = _Batch(theirs, own, memcpy, self.group_blocks)
        else:
            self._issuer = _Rows(theirs, own)

    def attach(self, slots: Slots) -> None:
        """The sharer's slots are mapped already."""

    def detach(self) -> None: ...

    def prepare(self) -> bool:
        return False

    def differs(self, copies: Sequence[Copy]) -> list[bool]:  # noqa: ARG002 - see below
        raise AssertionError("shared blocks are not compared")

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> InFlight:
        assert loads, "shared blocks are only read"
        use_device(self._device)
        flight = InFlight()
        try:
            with translated_errors():
                for turn, stream in enumerate(self._streams):
                    part = copies[turn :: len(self._streams)]
                    if part:
                        self._issuer.issue(part, stream)
                        done = self._end_event(len(copies) * self.shape.block_bytes)
                        done.record(stream)
                        flight.add(f"peer_{self.path}", len(part), done)
        except BaseException:
            self._synchronize()
            raise
        return flight

    def close(self) -> None:
        use_device(self._device)
        self._synchronize()

    def _end_event(self, size_bytes: int) -> Event:
        return cupy.cuda.Event(block=size_bytes > SPIN_BYTES, disable_timing=True)

    def _synchronize(self) -> None:
        with translated_errors():
            for stream in self._streams:
                stream.synchronize()


def best_path(fragments: int, *, batch: bool) -> SharePath:
    """Return the path for blocks of `fragments` pieces; `batch`: the driver has that path."""
    if fragments > 1:
        return "kernel"
    return "batch" if batch else "rows"


class _Issuer(Protocol):
    def issue(self, copies: Sequence[Copy], on: Stream) -> None: ...


class _Rows:
    def __init__(self, theirs: BlockShape, own: BlockShape) -> None:
        self._theirs, self._own = theirs, own
        pitches = theirs.pitch_bytes, own.pitch_bytes
        self._pitches = pitches if own.fragments > 1 and None not in pitches else None

    def issue(self, copies: Sequence[Copy], on: Stream) -> None:
        theirs, own, size_bytes, stream = self._theirs, self._own, self._own.fragment_bytes, on.ptr
        for copy in copies:
            origin, to = copy.pool_slot * theirs.stride_bytes, copy.device_slot * own.stride_bytes
            if self._pitches is not None:
                at, source = own.regions[0] + to, theirs.regions[0] + origin
                source_pitch, pitch = self._pitches
                runtime.memcpy2DAsync(at, pitch, source, source_pitch, size_bytes, own.fragments, ANYWHERE, stream)
                continue
            for source, target in zip(theirs.regions, own.regions, strict=True):
                runtime.memcpyAsync(target + to, source + origin, size_bytes, ANYWHERE, stream)


class _Batch:
    def __init__(self, theirs: BlockShape, own: BlockShape, memcpy: MemcpyBatch, most: int) -> None:
        self._theirs, self._own, self._memcpy, self._most = theirs, own, memcpy, most
        self._regions = [np.array(shape.regions, np.int64) for shape in (theirs, own)]
        self._sizes = np.full(most * own.fragments, own.fragment_bytes, np.uint64)

    def issue(self, copies: Sequence[Copy], on: Stream) -> None:
        for first in range(0, len(copies), self._most):
            sources, targets = _slots(copies[first : first + self._most])
            source = (sources * self._theirs.stride_bytes)[:, None] + self._regions[0]
            to = (targets * self._own.stride_bytes)[:, None] + self._regions[1]
            self._memcpy.copy(to, source, self._sizes, on)


class _Kernel:
    def __init__(self, kernel: ShareKernel) -> None:
        self._kernel = kernel

    def issue(self, copies: Sequence[Copy], on: Stream) -> None:
        for first in range(0, len(copies), MOST_BLOCKS):
            self._kernel.launch(*_slots(copies[first : first + MOST_BLOCKS]), on)


def _slots(copies: Sequence[Copy]) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of both ends, each int64 (copies,)."""
    sources = np.array([copy.pool_slot for copy in copies], np.int64)
    return sources, np.array([copy.device_slot for copy in copies], np.int64)
