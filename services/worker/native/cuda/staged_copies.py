"""Copies large arrays between a device and pageable memory at the speed of the link, by pinned rooms between the two.

    to the device     array ──threads──▶ room ──the link──▶ device        one thread fills 3 to 10 GB a second, the link
    to the host       device ──the link──▶ room ──threads──▶ array        carries 50; so several threads fill rooms

Plain copies of such memory go through one thread of the driver: 3 GB a second. Copies of several arrays follow one
another without a gap. What is CUDA's own is `begin` and the rooms' memory, so that all of this also runs without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

THREADS = 24
"""Threads that fill or empty rooms: on an H200 an 8B model falls asleep at 16, 19, 22 GB a second with 8, 16, 24."""
ROOMS, ROOM_BYTES = 32, 8 << 20

Bytes = NDArray[np.uint8]
Begin = Callable[[int, int, int], Callable[[], None]]
"""Begins a copy to an address, from an address, of some bytes. Returns what waits for its end, on any thread."""


def _nothing() -> None:
    """Wait for nothing, or prepare nothing."""


class StagedCopies:
    """Copies under way, in one direction. It belongs to one thread. At the end of the `with` block all have ended; if
    that ends by an error, those that have not begun are left out."""

    def __init__(
        self,
        rooms: Callable[[], Sequence[Bytes]],
        begin: Begin,
        threads: int = THREADS,
        prepare: Callable[[], None] = _nothing,
    ) -> None:
        """Copy through what `rooms` returns when the first copy needs it, pinned arrays of equal size. Each thread
        calls `prepare` first."""
        self._make_rooms = rooms
        self._begin = begin
        self._pool = ThreadPoolExecutor(threads, "staged-copies", prepare)
        self._next = 0
        self._ends: dict[int, Callable[[], None]] = {}
        """What waits for the end of the copy from a room, or of the one out of it, by the room's number."""
        self._filling: deque[tuple[Future[None], int, int, int]] = deque()
        """The rooms that are being filled, each with its number, where it goes, and how many bytes, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            while self._filling and kind is None:
                self._send()
        finally:
            self._end()

    @cached_property
    def _rooms(self) -> Sequence[Bytes]:
        return self._make_rooms()

    def to_device(self, address: int, source: Bytes) -> None:
        """Copy bytes to the device; `source` must not change before the end."""
        size_bytes = len(self._rooms[0])
        for first in range(0, len(source), size_bytes):
            piece = source[first : first + size_bytes]
            if len(self._filling) == max(1, len(self._rooms) // 2):  # the other half is on its way
                self._send()
            number = self._take_room()
            filling = self._pool.submit(np.copyto, self._rooms[number][: len(piece)], piece)
            self._filling.append((filling, number, address + first, len(piece)))

    def to_host(self, target: Bytes, address: int) -> None:
        """Copy bytes from the device; `target` has them at the end."""
        assert not self._filling, "copies go in one direction"
        size_bytes = len(self._rooms[0])
        for first in range(0, len(target), size_bytes):
            piece = target[first : first + size_bytes]
            number = self._take_room()
            room = self._rooms[number][: len(piece)]
            end = self._begin(room.ctypes.data, address + first, len(piece))
            self._ends[number] = end  # until a thread waits for it
            self._ends[number] = self._pool.submit(_emptied, end, piece, room).result

    def _take_room(self) -> int:
        """Return the number of the next room, once nothing needs what it has."""
        number = self._next % len(self._rooms)
        self._next += 1
        self._ends.pop(number, _nothing)()
        return number

    def _send(self) -> None:
        """Begin the copy of the first room that is being filled, once it is."""
        filling, number, address, size_bytes = self._filling.popleft()
        filling.result()
        self._ends[number] = self._begin(address, self._rooms[number].ctypes.data, size_bytes)

    def _end(self) -> None:
        """Wait for all that has begun, also if some of it fails, and end the threads. Raise the first error."""
        failed: list[Exception] = []
        for end in self._ends.values():
            try:
                end()
            except Exception as wrong:  # noqa: BLE001 - raised below
                failed.append(wrong)
        self._pool.shutdown()
        if failed:
            raise failed[0]


def _emptied(end: Callable[[], None], to: Bytes, room: Bytes) -> None:
    end()
    np.copyto(to, room)


def bytes_of(array: NDArray[Any]) -> Bytes:
    """Return a contiguous array of host memory as bytes."""
    return array.reshape(-1).view(np.uint8)
