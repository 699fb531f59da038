"""FrameLog: each frontend's step frames, which are numbered, sent in order, and kept for resending. Pure.

    one frontend's frames, by sequence

        dropped │ kept, sent                    │ kept, not sent yet │
                oldest                          unsent               next

A frame that cannot be published stays unsent and is sent, in order, when the bus is back. The ring is bounded in number
and in bytes. Over a bound the oldest frame is dropped, and counted as lost if it was never sent: the frontend sees the
gap, in the sequence and in the parts' `first`. Over a bound of frontends, the one that got no frame for longest is
forgotten.

A frontend that comes back after it was forgotten is numbered from 0 again. Its epoch is larger than before: all new
frontends get the log's epoch, which grows with each that is forgotten. So no receiver takes a new frame for an old
one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct

_encode = msgspec.msgpack.Encoder().encode


class _EncodedFrame(Struct, frozen=True, array_like=True):
    """A `shared.messages.frames.StepFrame` whose parts are encoded already."""

    instance: str
    epoch: int
    sequence: int
    parts: Raw


@dataclass(slots=True)
class _Ring:
    epoch: int
    frames: deque[bytes] = field(default_factory=deque)
    size_bytes: int = 0
    next: int = 0
    unsent: int = 0

    @property
    def oldest(self) -> int:
        return self.next - len(self.frames)


class FrameLog:
    """The step frames of one worker process."""

    def __init__(self, instance: str, *, most_frontends: int = 64, most_frames: int = 8192, most_bytes: int = 4 << 20):
        self._instance = instance
        self._most_frontends = most_frontends
        self._most_frames = most_frames
        self._most_bytes = most_bytes
        self._rings: OrderedDict[str, _Ring] = OrderedDict()
        """Least recently appended to first."""
        self._epoch = 1
        """Epoch of the next new frontend."""
        self.lost = 0
        """Frames dropped before they were ever sent."""

    def append(self, frontend: str, parts: bytes) -> None:
        """Make an encoded list of parts the frontend's next frame."""
        ring = self._rings.get(frontend) or self._new(frontend)
        self._rings.move_to_end(frontend)
        frame = _encode(_EncodedFrame(self._instance, ring.epoch, ring.next, Raw(parts)))
        ring.frames.append(frame)
        ring.size_bytes += len(frame)
        ring.next += 1
        while len(ring.frames) > self._most_frames or (ring.size_bytes > self._most_bytes and len(ring.frames) > 1):
            ring.size_bytes -= len(ring.frames.popleft())
            if ring.unsent < ring.oldest:
                ring.unsent = ring.oldest
                self.lost += 1

    @property
    def frontends(self) -> list[str]:
        """Frontends that frames are kept for."""
        return list(self._rings)

    def next_unsent(self, frontend: str) -> bytes | None:
        """Return the next frame to publish. None if all were sent."""
        ring = self._rings.get(frontend)
        if ring is None or ring.unsent == ring.next:
            return None
        return ring.frames[ring.unsent - ring.oldest]

    def mark_sent(self, frontend: str, frame: bytes) -> None:
        """`frame`, as `next_unsent` returned it, was published; it may have been dropped meanwhile."""
        if self.next_unsent(frontend) is frame:
            self._rings[frontend].unsent += 1

    def rewind(self, frontend: str, first: int) -> tuple[int, int, int]:
        """Mark the frames from `first` on as unsent. Return (epoch, the first that is still kept, the next new one).
        If nothing is kept for the frontend, the epoch of its next frame is at least the returned one."""
        ring = self._rings.get(frontend)
        if ring is None:
            return self._epoch, 0, 0
        ring.unsent = min(max(first, ring.oldest), ring.unsent)
        return ring.epoch, ring.unsent, ring.next

    @property
    def last_sequences(self) -> dict[str, int]:
        """Frontend → sequence of the last frame made for it."""
        return {frontend: ring.next - 1 for frontend, ring in self._rings.items()}

    def forget(self, frontend: str) -> None:
        """Drop what is kept for a frontend that has gone, or that exceeds the bound."""
        ring = self._rings.pop(frontend, None)
        if ring is not None:
            self._epoch += 1
            self.lost += ring.next - ring.unsent

    def _new(self, frontend: str) -> _Ring:
        if len(self._rings) >= self._most_frontends:
            self.forget(next(iter(self._rings)))
        ring = self._rings[frontend] = _Ring(self._epoch)
        return ring

    def validate(self) -> None:
        """Raise AssertionError if the log contradicts itself."""
        assert len(self._rings) <= self._most_frontends
        for ring in self._rings.values():
            assert 1 <= ring.epoch <= self._epoch
            assert 0 <= ring.oldest <= ring.unsent <= ring.next
            assert ring.size_bytes == sum(len(frame) for frame in ring.frames)
            assert len(ring.frames) <= self._most_frames
            assert ring.size_bytes <= self._most_bytes or len(ring.frames) == 1
