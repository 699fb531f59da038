"""Measures each path, on this machine and with these blocks, before the engine runs: 0.1 to 0.8 s.

Blocks are saved into scratch memory and loaded back where they came from, so that nothing changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cupy.cuda import runtime  # pyright: ignore[reportMissingImports]

from services.worker.copies import Copy
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import group_blocks
from services.worker.transfer.cuda import our_errors, sleeping_event, stream
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.path_choice import Measured
from services.worker.transfer.paths import Host, Path

COUNTS = (1, 8)
"""Blocks in a group, beside as many as a mover hands over in one go."""
GROUPS = 8
"""One behind the other, as a lane hands them over: the 100 µs before the first byte must not decide. Of a single block
it counts how soon it is there, so only one."""
TRIES = 3

_log = logging.getLogger(__name__)


def calibrate(paths: Mapping[str, Path], shape: BlockShape, clock: Callable[[], float]) -> list[Measured]:
    """The best of TRIES, after one that does not count, of each path, direction and number of blocks. A path that fails
    is left out, and said. Raises DeviceFailed where nothing goes."""
    most = min(group_blocks(shape.block_bytes), shape.slots)
    counts = sorted({min(count, most) for count in (*COUNTS, most)})
    measured: list[Measured] = []
    with our_errors(), _scratch(most * shape.block_bytes) as at:
        for name, path in paths.items():
            times = _Stopwatch(path, shape, Host(at, shape.block_bytes), clock)
            try:
                rows = [
                    Measured(name, loads, blocks, times.best_s(blocks, loads=loads))
                    for blocks in counts
                    for loads in (False, True)  # what is loaded was saved by the same path
                ]
            except DeviceFailed as wrong:
                _log.warning("copies do not take the path %s: %s", name, wrong)
            else:
                measured += rows
    if not measured:
        raise DeviceFailed("blocks go on none of the paths: " + ", ".join(paths))
    return measured


class _Stopwatch:
    """One path's."""

    def __init__(self, path: Path, shape: BlockShape, host: Host, clock: Callable[[], float]) -> None:
        self._path = path
        self._shape = shape
        self._host = host
        self._clock = clock
        self._on = stream()

    def best_s(self, blocks: int, *, loads: bool) -> float:
        """A group's time, of device slots that lie apart."""
        spread = self._shape.slots // blocks
        copies = [Copy(index, index * spread) for index in range(blocks)]
        self._took_s(copies, loads=loads)
        return min(self._took_s(copies, loads=loads) for _ in range(TRIES))

    def _took_s(self, copies: list[Copy], *, loads: bool) -> float:
        groups = GROUPS if len(copies) > 1 else 1
        begun_s = self._clock()
        with our_errors():
            for _ in range(groups - 1):
                self._path.issue(copies, self._host, loads=loads, on=self._on)
            done = sleeping_event()
            done.record(self._path.issue(copies, self._host, loads=loads, on=self._on))
            done.synchronize()
        return (self._clock() - begun_s) / groups


@contextmanager
def _scratch(size_bytes: int) -> Iterator[int]:
    at = runtime.hostAlloc(size_bytes, 0)
    try:
        yield at
    finally:
        runtime.freeHost(at)
