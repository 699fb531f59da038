"""CudaCopier: copies blocks between the GPU and the pool, each group on the path that suits it best.

saves   own stream, own staging ring ─┐               yes ┌─▶ rows, batch, staged, direct: as `path_choice` says
loads   own stream, own staging ring ─┴─▶ slot pinned? ───┤      │ fails when it is issued: synchronize, try the next
                                                       no └─▶ pageable                         also the last resort

A path that fails MOST_IN_A_ROW times in a row is not used again. After a lost context every CUDA call fails, the
synchronization too, and so the error reaches the caller.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import gcd

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np

from services.worker.config import CopyPath
from services.worker.contracts.mover import Copy, Slots
from services.worker.transfer import memcpy_batch
from services.worker.transfer.block_checksum import block_checksum
from services.worker.transfer.block_shape import BlockShape, SlotPart
from services.worker.transfer.checksum_kernel import ChecksumKernel
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import (
    Event,
    end_event,
    new_stream,
    register,
    translated_errors,
    unregister,
    use_device,
)
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from services.worker.transfer.fragment_kernel import DIRECT_MULTIPROCESSORS, FragmentKernel
from services.worker.transfer.path_choice import MANY_BLOCKS, Fallbacks, path_order
from services.worker.transfer.paths import BatchPath, DirectPath, RowsPath, SlotArray, StagedPath, TransferPath
from services.worker.transfer.pinned_slots import CHUNK_BYTES, PinnedSlots
from services.worker.transfer.staging_ring import StagingRing
from shared.errors import ConfigError
from shared.pool.format import PAGE_BYTES

PAGEABLE = "pageable"

_log = logging.getLogger(__name__)


class CudaCopier:
    """A Copier for one GPU."""

    duplex = True
    """The two directions of the link do not slow each other down."""

    def __init__(
        self,
        shape: BlockShape,
        memory: DeviceMemory,
        clock: Callable[[], float],
        *,
        path: CopyPath = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        part: SlotPart | None = None,
    ) -> None:
        """Prepare both directions.

        `shape` lies on `memory.device`. `path` names the path to take, or is `auto`. `chunk_bytes` is PinnedSlots'.
        `part` says where the blocks' fragments lie in the pool's slots, if they are a part of those. Raise ConfigError
        if there is no such path, and DeviceFailed.
        """
        shape.validate()
        self.shape = shape
        self._part = part or SlotPart(0, shape.fragment_bytes, shape.block_bytes)
        self.group_blocks = group_blocks(shape.block_bytes)
        self._device = memory.device
        self._clock = clock
        self._chunk_bytes = chunk_bytes
        use_device(memory.device)
        with translated_errors():
            cupy.cuda.get_current_stream().synchronize()  # the blocks may still be being filled
            self.directions = {loads: Direction(shape, memory, part) for loads in (False, True)}
        self._slots: Slots | None = None
        self._pool: SlotArray | None = None
        self._pinned: PinnedSlots | None = None
        self._checksums: ChecksumKernel | None = None
        # One direction may have found no room for its staging ring.
        offered = [name for name in self.directions[False].paths if name in self.directions[True].paths]
        if path not in ("auto", *offered):
            self.close()
            there = ", ".join(offered) or "none"
            raise ConfigError(
                f"copy_path is {path}, which this GPU does not offer for these blocks; set one of: auto, {there}"
            )
        self._few_order, self._many_order = (
            (*path_order(blocks, offered, fragments=shape.fragments, forced=path), PAGEABLE)
            for blocks in (1, MANY_BLOCKS)
        )
        few, many = self._few_order[0], self._many_order[0]
        _log.info("blocks are copied on the path %s, and on %s if they are %d or more", few, many, MANY_BLOCKS)

    def attach(self, slots: Slots) -> None:
        arena = slots.arena
        at = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
        self._slots = slots
        self._pool = SlotArray(at + self._part.first_bytes, arena.slot_bytes, self._part.pitch_bytes)
        self._pinned = PinnedSlots(
            at, arena.slot_bytes, arena.slots, register, unregister, self._clock, self._chunk_bytes
        )

    def detach(self) -> None:
        pinned, self._pinned, self._pool, self._slots = self._pinned, None, None, None
        if pinned is not None:
            use_device(self._device)  # a thread that has copied nothing would take memory of the first GPU
            pinned.unpin_all()

    def prepare(self) -> bool:
        use_device(self._device)
        pinned = self._pinned
        return pinned is not None and pinned.pin_next_chunk()

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> InFlight:
        pinned, pool, direction = self._pinned, self._pool, self.directions[loads]
        assert pinned is not None
        assert pool is not None
        use_device(self._device)
        fast = copies if pinned.all_pinned else [copy for copy in copies if pinned.ensure_pinned(copy.pool_slot)]
        flight = InFlight()
        try:
            if fast:
                order = self._many_order if len(fast) >= MANY_BLOCKS else self._few_order
                direction.hand_over(fast, pool, order, flight, loads=loads)
            if len(fast) < len(copies):
                slow = [copy for copy in copies if not pinned.ensure_pinned(copy.pool_slot)]
                direction.hand_over(slow, pool, (PAGEABLE,), flight, loads=loads)
        except BaseException:
            direction.synchronize()
            raise
        return flight

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        slots = self._slots
        assert slots is not None
        use_device(self._device)
        if self._checksums is None:
            self._checksums = ChecksumKernel(self.shape)
        on_device = self._checksums.checksums([copy.device_slot for copy in copies], self.directions[True].stream)
        slot_bytes = slots.arena.slot_bytes
        begins = [copy.pool_slot * slot_bytes for copy in copies]
        return [
            mine != block_checksum(self._own_part(slots.bytes[at : at + self._part.block_bytes]))
            for mine, at in zip(on_device, begins, strict=True)
        ]

    def _own_part(self, block: memoryview) -> memoryview:
        """Return the fragments of a block in the pool, back to back."""
        part, shape = self._part, self.shape
        if part.pitch_bytes == shape.fragment_bytes:
            return block
        rows = np.frombuffer(block, np.uint8).reshape(shape.fragments, part.pitch_bytes)
        own = rows[:, part.first_bytes : part.first_bytes + shape.fragment_bytes]
        return memoryview(own.tobytes())

    def close(self) -> None:
        """Free what the copier holds. Nothing may be under way."""
        self.detach()
        for direction in self.directions.values():
            direction.close()


class Direction:
    """The stream and the paths of one direction. It belongs to that direction's thread."""

    def __init__(self, shape: BlockShape, memory: DeviceMemory, part: SlotPart | None = None) -> None:
        """Make the stream and the paths. The path `staged` is missing if the GPU has no room for a staging ring, or
        blocks are a `part` of those in the pool, so that their fragments lie apart there: then there is `direct`."""
        self.stream = new_stream()
        self._block_bytes = shape.block_bytes
        self.fallbacks = Fallbacks()
        rows = RowsPath(shape)
        self.pageable: TransferPath = rows
        self.paths: dict[str, TransferPath] = {}
        """All paths but `pageable`, by name."""
        if shape.pitch_bytes is not None:
            self.paths["rows"] = rows
        memcpy = memcpy_batch.load_memcpy_batch()
        if memcpy is not None:
            self.paths["batch"] = BatchPath(shape, memcpy)
        self.ring: StagingRing | None = None
        if part is not None:
            aligned = gcd(PAGE_BYTES, part.first_bytes, part.pitch_bytes)
            kernel = FragmentKernel(shape, aligned, part.pitch_bytes, DIRECT_MULTIPROCESSORS)
            self.paths["direct"] = DirectPath(kernel)
        elif shape.fragments > 1:  # otherwise a block is one piece already
            kernel = FragmentKernel(shape, min(PAGE_BYTES, _alignment(shape.block_bytes)))
            try:
                self.ring = StagingRing(memory, shape.block_bytes)
                self.paths["staged"] = StagedPath(shape, kernel, self.ring, memcpy)
            except DeviceMemoryExhausted as wrong:
                _log.warning("the copy path staged is not used, as the GPU has no room for its ring: %s", wrong)

    def hand_over(
        self, copies: Sequence[Copy], pool: SlotArray, order: Sequence[str], flight: InFlight, *, loads: bool
    ) -> None:
        """Issue copies on the first path of `order` that works.

        Raise DeviceFailed if all paths fail or the device is lost.
        """
        usable = self.fallbacks.usable(order)
        for name in usable:
            path = self.pageable if name == PAGEABLE else self.paths[name]
            try:
                with translated_errors():
                    done = end_event(len(copies) * self._block_bytes)
                    done.record(path.issue(copies, pool, loads=loads, on=self.stream))
            except DeviceFailed as wrong:
                self.synchronize()  # before the same blocks are copied again
                if name == usable[-1]:
                    raise
                if self.fallbacks.record_failure(name):
                    _log.warning("the copy path %s keeps failing and is not used any more: %s", name, wrong)
                flight.fallbacks[f"{name}: {wrong.reason}"] += len(copies)
            else:
                self.fallbacks.record_success(name)
                flight.add(name, len(copies), done)
                return

    def synchronize(self) -> None:
        """Wait until nothing is under way. Raise DeviceFailed."""
        with translated_errors():
            self.stream.synchronize()
            if self.ring is not None:
                self.ring.kernels.synchronize()

    def close(self) -> None:
        self.synchronize()
        if self.ring is not None:
            self.ring.close()


class InFlight:
    """Copies that were issued, as a `Pending`."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._events: list[Event] = []

    def add(self, path: str, blocks: int, done: Event) -> None:
        self.paths[path] += blocks
        self._events.append(done)

    def wait(self) -> None:
        with translated_errors():
            for event in self._events:
                event.synchronize()


def _alignment(size_bytes: int) -> int:
    """Return the largest power of two that divides `size_bytes`."""
    return size_bytes & -size_bytes
