"""Measures how fast each path copies, on this machine and with these blocks. Takes 0.3 to 1 s, before the engine runs.

Blocks are saved into scratch memory and loaded back to where they came from, so that nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.mover import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import Event, end_event, new_stream, translated_errors
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from services.worker.transfer.memory_step import STEP_S, MemoryStep
from services.worker.transfer.path_choice import PathTiming
from services.worker.transfer.paths import SlotArray, TransferPath

COUNTS = (1, 8, 64)
"""Measured group sizes, in blocks. The largest group that a mover hands over is measured too."""
LONG_S = 10e-3
"""How long groups of the largest size are copied back to back, as a lane does it. The start-up time of 50 to 300 µs
before the first byte must not decide there. A smaller group comes alone in practice, so its latency is measured."""
MOST_GROUPS = 200
"""The most groups that one measurement issues back to back."""
TRIES = 3
TRIES_ALONE = 9

_log = logging.getLogger(__name__)


def counts(shape: BlockShape) -> tuple[int, ...]:
    """Return the group sizes that are measured, in blocks."""
    most = min(group_blocks(shape.block_bytes), shape.slots)
    return tuple(sorted({min(count, most) for count in (*COUNTS, most)}))


def calibrate(
    paths: Mapping[str, TransferPath], shape: BlockShape, device: int, clock: Callable[[], float]
) -> list[PathTiming]:
    """Measure each path, direction and group size. A path that fails is logged and left out.

    Raises DeviceFailed if no path works or the device is lost.
    """
    sizes = counts(shape)
    measured: list[PathTiming] = []
    with translated_errors(), _scratch(sizes[-1] * shape.block_bytes) as at, _step(device) as step:
        alone_s = median(step.run_s() for _ in range(TRIES)) if step is not None else 0.0
        for name, path in paths.items():
            trial = _Trial(path, shape, SlotArray(at, shape.block_bytes), clock, sizes[-1])
            try:
                rows = []
                for blocks in sizes:
                    for loads in (False, True):  # a path loads what it has saved itself
                        took_s = trial.group_s(blocks, loads=loads)
                        taken_s = (
                            0.0 if step is None else trial.step_delay_s(blocks, took_s, step, alone_s, loads=loads)
                        )
                        rows.append(PathTiming(name, loads, blocks, took_s, taken_s))
            except DeviceFailed as wrong:
                trial.synchronize()
                _log.warning("the copy path %s failed its calibration and is not used: %s", name, wrong)
            else:
                measured += rows
    if not measured:
        raise DeviceFailed("no copy path works; these were tried: " + ", ".join(paths))
    return measured


class _Trial:
    """Measurements of one path."""

    def __init__(
        self, path: TransferPath, shape: BlockShape, pool: SlotArray, clock: Callable[[], float], most: int
    ) -> None:
        """`most` is the number of blocks in the largest group."""
        self._path = path
        self._shape = shape
        self._pool = pool
        self._clock = clock
        self._most = most
        self._on = new_stream()

    def group_s(self, blocks: int, *, loads: bool) -> float:
        """Return the seconds that a group takes by itself: the best of some tries, after one that does not count."""
        first_s = self._tried_s(blocks, 1, loads=loads)
        groups, tries = (_fitting(LONG_S, first_s), TRIES) if blocks == self._most else (1, TRIES_ALONE)
        return min(self._tried_s(blocks, groups, loads=loads) for _ in range(tries)) / groups

    def step_delay_s(self, blocks: int, took_s: float, step: MemoryStep, alone_s: float, *, loads: bool) -> float:
        """Return by how many seconds a group delays a step that runs at the same time.

        As many groups are issued as fit into half of the step.
        """
        groups = _fitting(STEP_S / 2, took_s)
        beside_s = []
        for _ in range(TRIES):
            events: list[Event] = []
            beside_s.append(step.run_s(lambda: events.append(self._issued(blocks, groups, loads=loads))))  # noqa: B023
            with translated_errors():
                events[0].synchronize()
        return max(0.0, median(beside_s) - alone_s) / groups

    def _tried_s(self, blocks: int, groups: int, *, loads: bool) -> float:
        begun_s = self._clock()
        with translated_errors():
            self._issued(blocks, groups, loads=loads).synchronize()
        return self._clock() - begun_s

    def synchronize(self) -> None:
        """Wait until no copy is under way. Raises DeviceFailed if the device is lost."""
        with translated_errors():
            runtime.deviceSynchronize()  # no engine runs yet, and some of a path's streams are its own

    def _issued(self, blocks: int, groups: int, *, loads: bool) -> Event:
        """Issue copies of device slots that lie apart; the event happens when all of them were made."""
        spread = self._shape.slots // blocks
        copies = [Copy(index, index * spread) for index in range(blocks)]
        with translated_errors():
            for _ in range(groups - 1):
                self._path.issue(copies, self._pool, loads=loads, on=self._on)
            done = end_event(groups * blocks * self._shape.block_bytes)
            done.record(self._path.issue(copies, self._pool, loads=loads, on=self._on))
            return done


def _fitting(long_s: float, group_s: float) -> int:
    """Return how many groups take about `long_s` seconds."""
    return max(1, min(round(long_s / group_s), MOST_GROUPS))


@contextmanager
def _scratch(size_bytes: int) -> Iterator[int]:
    at = runtime.hostAlloc(size_bytes, 0)
    try:
        yield at
    finally:
        runtime.freeHost(at)


@contextmanager
def _step(device: int) -> Iterator[MemoryStep | None]:
    """Yield a step to disturb, or None if the device has no room for one."""
    step: MemoryStep | None = None
    try:
        step = MemoryStep(device)
    except DeviceMemoryExhausted as wrong:
        _log.warning("how much copies slow a step is not measured, as the GPU has no room for it: %s", wrong)
    try:
        yield step
    finally:
        if step is not None:
            step.close()
