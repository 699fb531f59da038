"""CudaCopier: copies blocks between the GPU and the pool, each group on the path that was measured to be best for it.

saves   own stream, own staging ring ─┐               yes ┌─▶ rows, batch, staged, zero_copy   as calibrated, or set
loads   own stream, own staging ring ─┴─▶ slot pinned? ───┤      │ fails when it is handed over: settled, next best
                                                       no └─▶ pageable                         also last of them

A path that fails MOST_IN_A_ROW times one after another is left out for good. A lost context fails all that is asked of
CUDA from then on, also the settling, and so stays an error.
"""

from __future__ import annotations

import ctypes
import logging
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence

import cupy  # pyright: ignore[reportMissingImports]

from services.worker.config import CopyPath
from services.worker.mover import Copy, Slots
from services.worker.transfer import memcpy_batch
from services.worker.transfer.block_checksum import block_checksum
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.calibration import calibrate, counts
from services.worker.transfer.checksum_kernel import ChecksumKernel
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import Event, end_event, names, our_errors, register, stream, unregister, use
from services.worker.transfer.device_memory import DeviceMemory
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from services.worker.transfer.fallbacks import Fallbacks
from services.worker.transfer.fragment_kernel import FragmentKernel
from services.worker.transfer.path_choice import Measured, PathChoice
from services.worker.transfer.path_table import TableKey, read_table, write_table
from services.worker.transfer.paths import Batched, Path, Rows, SlotArray, Staged, ZeroCopy
from services.worker.transfer.pinned_slots import CHUNK_BYTES, PinnedSlots
from services.worker.transfer.staging_ring import StagingRing
from shared.errors import ConfigError
from shared.pool.format import PAGE_BYTES

PAGEABLE = "pageable"

_log = logging.getLogger(__name__)


class CudaCopier:
    """A Copier; see the module."""

    duplex = True
    """The link's directions do not slow each other."""

    def __init__(
        self,
        shape: BlockShape,
        memory: DeviceMemory,
        clock: Callable[[], float],
        *,
        path: CopyPath = "auto",
        cache: pathlib.Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`shape` lies on `memory.device`, and nobody uses it yet: calibration reads blocks and writes them back.
        `path`: the one to take; auto: as measured, which `cache`, a directory, keeps. `chunk_bytes`: as PinnedSlots
        has it. Raises ConfigError where there is no such path, DeviceFailed."""
        shape.validate()
        self.shape = shape
        self.group_blocks = group_blocks(shape.block_bytes)
        self._device = memory.device
        self._clock = clock
        self._chunk_bytes = chunk_bytes
        use(memory.device)
        with our_errors():
            cupy.cuda.get_current_stream().synchronize()  # whoever filled the blocks
            self.directions = {loads: Direction(shape, memory) for loads in (False, True)}
        self._slots: Slots | None = None
        self._pool: SlotArray | None = None
        self._pinned: PinnedSlots | None = None
        self._checksums: ChecksumKernel | None = None
        try:
            self.choice = self._chosen(path, cache)
        except BaseException:
            self.close()
            raise

    def attach(self, slots: Slots) -> None:
        arena = slots.arena
        at = ctypes.addressof(ctypes.c_char.from_buffer(slots.bytes))
        self._slots = slots
        self._pool = SlotArray(at, arena.slot_bytes)
        self._pinned = PinnedSlots(
            at, arena.slot_bytes, arena.slots, register, unregister, self._clock, self._chunk_bytes
        )

    def detach(self) -> None:
        pinned, self._pinned, self._pool, self._slots = self._pinned, None, None, None
        if pinned is not None:
            pinned.release()

    def prepare(self) -> bool:
        use(self._device)
        pinned = self._pinned
        return pinned is not None and pinned.prepare()

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> InFlight:
        pinned, pool, direction = self._pinned, self._pool, self.directions[loads]
        assert pinned is not None
        assert pool is not None
        use(self._device)
        fast = copies if pinned.whole else [copy for copy in copies if pinned.ensure(copy.pool_slot)]
        flight = InFlight()
        try:
            if fast:
                order = self.choice.order(len(fast), loads=loads)
                direction.hand_over(fast, pool, (*order, PAGEABLE), flight, loads=loads)
            if len(fast) < len(copies):
                slow = [copy for copy in copies if not pinned.ensure(copy.pool_slot)]
                direction.hand_over(slow, pool, (PAGEABLE,), flight, loads=loads)
        except BaseException:
            direction.settle()
            raise
        return flight

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        slots = self._slots
        assert slots is not None
        use(self._device)
        if self._checksums is None:
            self._checksums = ChecksumKernel(self.shape)
        told = self._checksums.checksums([copy.device_slot for copy in copies], self.directions[True].stream)
        slot_bytes, block_bytes = slots.arena.slot_bytes, self.shape.block_bytes
        begins = [copy.pool_slot * slot_bytes for copy in copies]
        return [
            there != block_checksum(slots.bytes[at : at + block_bytes]) for there, at in zip(told, begins, strict=True)
        ]

    def close(self) -> None:
        """Nothing is under way."""
        self.detach()
        for direction in self.directions.values():
            direction.close()

    def _chosen(self, path: CopyPath, cache: pathlib.Path | None) -> PathChoice:
        saves, loads = self.directions[False].paths, self.directions[True].paths
        paths = {name: saves[name] for name in saves if name in loads}  # one may have found no room for its ring
        if path != "auto":
            if path not in paths:
                there = ", ".join(paths) or "none"
                raise ConfigError(f"copy_path is {path}; with this GPU and these blocks there are: auto, {there}")
            _log.info("blocks are copied by %s, as set", path)
            return PathChoice.forced(path, list(paths))
        measured, whence = self._measured(paths, cache)
        choice = PathChoice.cheapest(measured)
        _log.info(
            "copy paths by what they cost, blocks in a group: µs alone + µs from a step beside (%s)\n%s",
            whence,
            "\n".join(choice.table()),
        )
        return choice

    def _measured(self, paths: dict[str, Path], cache: pathlib.Path | None) -> tuple[list[Measured], str]:
        shape = self.shape
        gpu, driver, cupy_version = names(self._device)
        key = TableKey(
            gpu=gpu,
            driver=driver,
            cupy=cupy_version,
            fragments=shape.fragments,
            fragment_bytes=shape.fragment_bytes,
            even=shape.pitch_bytes is not None,
            blocks=counts(shape),
            paths=tuple(paths),
        )
        kept = read_table(cache, key) if cache is not None else None
        if kept is not None:
            return kept, f"as kept in {cache}"
        measured = calibrate(paths, shape, self._device, self._clock)
        if cache is not None:
            write_table(cache, key, measured)
        return measured, "measured now"


class Direction:
    """One direction's stream and paths; belongs to its thread."""

    def __init__(self, shape: BlockShape, memory: DeviceMemory) -> None:
        """Without room for a staging ring there is no path `staged`."""
        self.stream = stream()
        self._block_bytes = shape.block_bytes
        self.fallbacks = Fallbacks()
        rows = Rows(shape)
        self.pageable: Path = rows
        self.paths: dict[str, Path] = {}
        """All but `pageable`."""
        if shape.pitch_bytes is not None:
            self.paths["rows"] = rows
        memcpy = memcpy_batch.offered()
        if memcpy is not None:
            self.paths["batch"] = Batched(shape, memcpy)
        self.ring: StagingRing | None = None
        if shape.fragments > 1:  # else a block is one piece already
            kernel = FragmentKernel(shape, min(PAGE_BYTES, _alignment(shape.block_bytes)))
            try:
                self.ring = StagingRing(memory, shape.block_bytes)
                self.paths["staged"] = Staged(shape, kernel, self.ring, memcpy)
            except DeviceMemoryExhausted as wrong:
                _log.warning("blocks are copied without a staging ring, for which the GPU has no room: %s", wrong)
            self.paths["zero_copy"] = ZeroCopy(kernel)

    def hand_over(
        self, copies: Sequence[Copy], pool: SlotArray, order: Sequence[str], flight: InFlight, *, loads: bool
    ) -> None:
        """On the first path of the order that works. Raises DeviceFailed where the last one fails, or the device."""
        usable = self.fallbacks.usable(order)
        for name in usable:
            path = self.pageable if name == PAGEABLE else self.paths[name]
            try:
                with our_errors():
                    done = end_event(len(copies) * self._block_bytes)
                    done.record(path.issue(copies, pool, loads=loads, on=self.stream))
            except DeviceFailed as wrong:
                self.settle()  # before they are made again
                if name == usable[-1]:
                    raise
                if self.fallbacks.failed(name):
                    _log.warning("blocks are not copied by %s any more, which keeps failing: %s", name, wrong)
                flight.fallbacks[f"{name}: {wrong.reason}"] += len(copies)
            else:
                self.fallbacks.worked(name)
                flight.add(name, len(copies), done)
                return

    def settle(self) -> None:
        """Until nothing is under way. Raises DeviceFailed."""
        with our_errors():
            self.stream.synchronize()
            if self.ring is not None:
                self.ring.kernels.synchronize()

    def close(self) -> None:
        self.settle()
        if self.ring is not None:
            self.ring.close()


class InFlight:
    """A Pending."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._events: list[Event] = []

    def add(self, path: str, blocks: int, done: Event) -> None:
        self.paths[path] += blocks
        self._events.append(done)

    def wait(self) -> None:
        with our_errors():
            for event in self._events:
                event.synchronize()


def _alignment(size_bytes: int) -> int:
    """The largest power of two that divides it."""
    return size_bytes & -size_bytes
