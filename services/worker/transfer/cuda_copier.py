"""CudaCopier: copies blocks between the GPU and the pool, each group on the path that was measured to be best for it.

saves   own stream, own staging ring ─┐                      ┌─ rows, batch, staged, zero_copy   as calibrated
loads   own stream, own staging ring ─┴─▶ which slots are ───┴─ pageable                         where CUDA would
                                          pinned?                                                not pin the slot
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence

import cupy  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from services.worker.copies import Copy, Slots
from services.worker.transfer import memcpy_batch
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.calibration import calibrate
from services.worker.transfer.cuda import Event, our_errors, register, sleeping_event, stream, unregister, use
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.fragment_kernel import FragmentKernel
from services.worker.transfer.path_choice import PathChoice
from services.worker.transfer.paths import Batched, Host, Path, Rows, Staged, ZeroCopy
from services.worker.transfer.pinned_slots import PinnedSlots
from services.worker.transfer.staging_ring import StagingRing
from shared.pool_format import PAGE_BYTES

PAGEABLE = "pageable"


class CopierStatistics(Struct, frozen=True):
    """Blocks that were handed over, by path."""

    saved: dict[str, int]
    loaded: dict[str, int]
    chunks_refused: int
    """Of the pool that is attached: CUDA would not pin them."""


class Direction:
    """One direction's stream, paths and counts; belongs to its thread."""

    def __init__(self, shape: BlockShape, memory: DeviceMemory) -> None:
        self.stream = stream()
        self.blocks: Counter[str] = Counter()
        rows = Rows(shape)
        self.pageable: Path = rows
        self.paths: dict[str, Path] = {}
        if shape.pitch_bytes is not None:
            self.paths["rows"] = rows
        memcpy = memcpy_batch.offered()
        if memcpy is not None:
            self.paths["batch"] = Batched(shape, memcpy)
        self.ring: StagingRing | None = None
        if shape.fragments > 1:  # else a block is one piece already
            kernel = FragmentKernel(shape, min(PAGE_BYTES, _alignment(shape.block_bytes)))
            self.ring = StagingRing(memory, shape.block_bytes)
            self.paths["staged"] = Staged(shape, kernel, self.ring, memcpy)
            self.paths["zero_copy"] = ZeroCopy(kernel)

    def settle(self) -> None:
        """Until nothing is under way."""
        with our_errors():
            self.stream.synchronize()
            if self.ring is not None:
                self.ring.kernels.synchronize()

    def close(self) -> None:
        self.settle()
        if self.ring is not None:
            self.ring.close()


class CudaCopier:
    """A Copier; see the module."""

    def __init__(self, shape: BlockShape, memory: DeviceMemory, clock: Callable[[], float]) -> None:
        """`shape` lies on `memory.device`, and nobody uses it yet: calibration reads blocks and writes them back.
        Raises DeviceFailed, DeviceMemoryExhausted."""
        shape.validate()
        self.shape = shape
        self._device = memory.device
        use(memory.device)
        with our_errors():
            cupy.cuda.get_current_stream().synchronize()  # whoever filled the blocks
            self.directions = {loads: Direction(shape, memory) for loads in (False, True)}
        self.choice = PathChoice(calibrate(self.directions[False].paths, shape, clock))
        self._host: Host | None = None
        self._pinned: PinnedSlots | None = None

    def attach(self, slots: Slots) -> None:
        arena = slots.arena
        at = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
        self._host = Host(at, arena.slot_bytes)
        self._pinned = PinnedSlots(at, arena.slot_bytes, arena.slots, register, unregister)

    def detach(self) -> None:
        pinned, self._pinned, self._host = self._pinned, None, None
        if pinned is not None:
            pinned.release()

    def prepare(self) -> bool:
        use(self._device)
        pinned = self._pinned
        return pinned is not None and pinned.prepare()

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> InFlight:
        pinned, host, direction = self._pinned, self._host, self.directions[loads]
        assert pinned is not None
        assert host is not None
        use(self._device)
        try:
            with our_errors():
                fast = [copy for copy in copies if pinned.ensure(copy.pool_slot)]
                events: list[Event] = []
                if fast:
                    name = self.choice.path(len(fast), loads=loads)
                    events.append(_issued(direction, name, direction.paths[name], fast, host, loads=loads))
                if len(fast) < len(copies):
                    slow = [copy for copy in copies if not pinned.ensure(copy.pool_slot)]
                    events.append(_issued(direction, PAGEABLE, direction.pageable, slow, host, loads=loads))
        except BaseException:
            direction.settle()
            raise
        return InFlight(events)

    def statistics(self) -> CopierStatistics:
        refused = self._pinned.refused if self._pinned is not None else 0
        return CopierStatistics(dict(self.directions[False].blocks), dict(self.directions[True].blocks), refused)

    def close(self) -> None:
        """Nothing is under way."""
        self.detach()
        for direction in self.directions.values():
            direction.close()


class InFlight:
    """A Pending."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        with our_errors():
            for event in self._events:
                event.synchronize()


def _issued(direction: Direction, name: str, path: Path, copies: Sequence[Copy], host: Host, *, loads: bool) -> Event:
    done = sleeping_event()
    done.record(path.issue(copies, host, loads=loads, on=direction.stream))
    direction.blocks[name] += len(copies)
    return done


def _alignment(size_bytes: int) -> int:
    """The largest power of two that divides it."""
    return size_bytes & -size_bytes
