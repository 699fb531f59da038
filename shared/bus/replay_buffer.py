"""Keeps the last batches of an event stream for replay, limited in number and in bytes."""

from __future__ import annotations

from collections import deque

RING_BYTES = 64 << 20


class ReplayBuffer:
    """Batches in order of their sequence. Over either limit the oldest are dropped; the newest always stays."""

    def __init__(self, limit_batches: int, limit_bytes: int = RING_BYTES) -> None:
        assert limit_batches > 0
        assert limit_bytes > 0
        self._limit_batches = limit_batches
        self._limit_bytes = limit_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._size_bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        """Keep a batch. A sequence that does not grow means that the source has restarted: older batches are
        dropped."""
        if self._batches and sequence <= self._batches[-1][0]:
            self._batches.clear()
            self._size_bytes = 0
        self._batches.append((sequence, payload))
        self._size_bytes += len(payload)
        while len(self._batches) > self._limit_batches or (
            self._size_bytes > self._limit_bytes and len(self._batches) > 1
        ):
            self._size_bytes -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from sequence `first` on that are still kept."""
        return [batch for batch in self._batches if batch[0] >= first]

    def validate(self) -> None:
        sequences = [sequence for sequence, _ in self._batches]
        assert sequences == sorted(set(sequences))
        assert self._size_bytes == sum(len(payload) for _, payload in self._batches)
        assert len(self._batches) <= self._limit_batches
        assert self._size_bytes <= self._limit_bytes or len(self._batches) == 1
