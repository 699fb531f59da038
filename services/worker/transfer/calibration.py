"""Measures each path, on this machine and with these blocks, before the engine runs; 0.3 to 1 s.

Blocks are saved into scratch memory and loaded back where they came from, so that nothing changes.
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
from services.worker.transfer.cuda import Event, end_event, our_errors, stream
from services.worker.transfer.errors import DeviceFailed, DeviceMemoryExhausted
from services.worker.transfer.memory_step import STEP_S, MemoryStep
from services.worker.transfer.path_choice import Measured
from services.worker.transfer.paths import Path, SlotArray

COUNTS = (1, 8, 64)
"""Blocks in a group, beside as many as a mover hands over in one go."""
LONG_S = 10e-3
"""For so long the largest groups go one behind the other, as a lane hands them over: what passes before the first
byte, 50 to 300 µs, must not decide. A smaller group comes alone, or it would be larger: of it counts how soon it is
there."""
MOST_GROUPS = 200
TRIES = 3
TRIES_ALONE = 9

_log = logging.getLogger(__name__)


def counts(shape: BlockShape) -> tuple[int, ...]:
    """Blocks in the groups that are measured."""
    most = min(group_blocks(shape.block_bytes), shape.slots)
    return tuple(sorted({min(count, most) for count in (*COUNTS, most)}))


def calibrate(paths: Mapping[str, Path], shape: BlockShape, device: int, clock: Callable[[], float]) -> list[Measured]:
    """Each path, direction and number of blocks. A path that fails is left out, and said. Raises DeviceFailed where
    nothing goes, or the device is lost."""
    sizes = counts(shape)
    measured: list[Measured] = []
    with our_errors(), _scratch(sizes[-1] * shape.block_bytes) as at, _step(device) as step:
        alone_s = median(step.took_s() for _ in range(TRIES)) if step is not None else 0.0
        for name, path in paths.items():
            trial = _Trial(path, shape, SlotArray(at, shape.block_bytes), clock, sizes[-1])
            try:
                rows = []
                for blocks in sizes:
                    for loads in (False, True):  # what is loaded was saved by the same path
                        took_s = trial.took_s(blocks, loads=loads)
                        taken_s = 0.0 if step is None else trial.taken_s(blocks, took_s, step, alone_s, loads=loads)
                        rows.append(Measured(name, loads, blocks, took_s, taken_s))
            except DeviceFailed as wrong:
                trial.settle()
                _log.warning("copies do not take the path %s: %s", name, wrong)
            else:
                measured += rows
    if not measured:
        raise DeviceFailed("no path: blocks go on none of " + ", ".join(paths))
    return measured


class _Trial:
    """One path's."""

    def __init__(self, path: Path, shape: BlockShape, pool: SlotArray, clock: Callable[[], float], most: int) -> None:
        """`most`: blocks in the largest group."""
        self._path = path
        self._shape = shape
        self._pool = pool
        self._clock = clock
        self._most = most
        self._on = stream()

    def took_s(self, blocks: int, *, loads: bool) -> float:
        """A group's time: the best of some tries, after one that does not count."""
        first_s = self._tried_s(blocks, 1, loads=loads)
        groups, tries = (_fitting(LONG_S, first_s), TRIES) if blocks == self._most else (1, TRIES_ALONE)
        return min(self._tried_s(blocks, groups, loads=loads) for _ in range(tries)) / groups

    def taken_s(self, blocks: int, took_s: float, step: MemoryStep, alone_s: float, *, loads: bool) -> float:
        """What a group takes from the step beside it, of as many groups as half of the step has room for."""
        groups = _fitting(STEP_S / 2, took_s)
        beside_s = []
        for _ in range(TRIES):
            events: list[Event] = []
            beside_s.append(step.took_s(lambda: events.append(self._issued(blocks, groups, loads=loads))))  # noqa: B023
            with our_errors():
                events[0].synchronize()
        return max(0.0, median(beside_s) - alone_s) / groups

    def _tried_s(self, blocks: int, groups: int, *, loads: bool) -> float:
        begun_s = self._clock()
        with our_errors():
            self._issued(blocks, groups, loads=loads).synchronize()
        return self._clock() - begun_s

    def settle(self) -> None:
        """Nothing of it is under way when this returns. Raises DeviceFailed where the device is lost."""
        with our_errors():
            runtime.deviceSynchronize()  # no engine runs yet, and some of a path's streams are its own

    def _issued(self, blocks: int, groups: int, *, loads: bool) -> Event:
        """Of device slots that lie apart. Happens when all were copied."""
        spread = self._shape.slots // blocks
        copies = [Copy(index, index * spread) for index in range(blocks)]
        with our_errors():
            for _ in range(groups - 1):
                self._path.issue(copies, self._pool, loads=loads, on=self._on)
            done = end_event(groups * blocks * self._shape.block_bytes)
            done.record(self._path.issue(copies, self._pool, loads=loads, on=self._on))
            return done


def _fitting(long_s: float, group_s: float) -> int:
    """How many groups take so long."""
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
    """None: the device has no room for one."""
    step: MemoryStep | None = None
    try:
        step = MemoryStep(device)
    except DeviceMemoryExhausted as wrong:
        _log.warning("what copies take from a step beside them is not measured: %s", wrong)
    try:
        yield step
    finally:
        if step is not None:
            step.close()
