"""Keeps the last batches of an event stream for replay, and collects those of a replay: limited in number and bytes."""

from __future__ import annotations

from collections import deque

from shared.errors import ProtocolError

RING_BYTES = 64 << 20
REPLAY_LIMIT_BATCHES = 100_000
REPLAY_LIMIT_BYTES = 512 << 20
"""The maximum size of a replay; a source that sends more is broken."""


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


class ReplayedBatches:
    """The batches of one replay from sequence `first` on, as they come. If the source has restarted on the way, only
    those after that count."""

    def __init__(self, first: int) -> None:
        self.batches: list[tuple[int, bytes]] = []
        self._first = first
        self._latest = -1
        self._size_bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        """Add the next batch. Raise ProtocolError if they are too many."""
        if sequence <= self._latest:
            self.batches.clear()
            self._size_bytes = 0
        self._latest = sequence
        if sequence < self._first:
            return
        self.batches.append((sequence, payload))
        self._size_bytes += len(payload)
        if len(self.batches) > REPLAY_LIMIT_BATCHES or self._size_bytes > REPLAY_LIMIT_BYTES:
            raise ProtocolError(f"a replay of more than {len(self.batches)} batches")
