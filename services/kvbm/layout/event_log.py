"""Reports one layout's blocks to routers: batches of KV events, and a mark of how far the events are.

    changes ──▶ waiting ──flush, 1024 blocks a batch──▶ published, sequence grows ──nothing waits──▶ mark

A mark is a sequence with the tiers' digests at that sequence, so it is set only when nothing waits. A disk that comes
up with a million blocks is reported in many turns of the loop; until then the mark stays the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import msgspec
from msgspec import Struct

from services.kvbm.tiers.actions import TierEvent
from shared.bus.contract import EventPublisher
from shared.kv_events import to_kv_events
from shared.messages.cards import EventSource
from shared.messages.kv_events import EVENT_BATCH, EventBatch, KvEvent

BATCH_BLOCKS = 1024
"""Blocks in one batch: 1 to 2 ms of work."""
BATCHES_A_TURN = 8
"""Batches that one turn of the loop publishes."""
BACKLOG_CHANGES = 65_536
"""While more changes wait than this, adding others publishes as many first. So at most this number and one disk's
blocks wait."""

_tier = itemgetter(0)


class EventMark(Struct, frozen=True):
    """The position of a layout's event stream."""

    sequence: int = -1
    """The sequence of the last batch; -1 before the first."""
    host_digest: int = 0
    disk_digest: int = 0


class EventLog:
    """The KV events of one layout. `digests` returns the digests of what can be found now, host and disk; `wall` is the
    wall clock."""

    def __init__(
        self,
        publisher: EventPublisher,
        block_size: int,
        digests: Callable[[], tuple[int, int]],
        wall: Callable[[], float],
    ) -> None:
        self.mark = EventMark()
        self._publisher = publisher
        self._block_size = block_size
        self._digests = digests
        self._wall = wall
        self._waiting: deque[TierEvent] = deque()
        self._sequence = -1

    @property
    def source(self) -> EventSource:
        """Where the events come from, for the address book."""
        return msgspec.structs.replace(self._publisher.source, epoch=True, snapshot=True, digest=True)

    @property
    def waiting(self) -> int:
        """The number of changes that are not published yet."""
        return len(self._waiting)

    def add(self, events: list[TierEvent]) -> None:
        """Add changes, in order, to be published at the next `flush`."""
        backlog = len(self._waiting) > BACKLOG_CHANGES
        self._waiting.extend(events)
        for _ in range(0, len(events) if backlog else 0, BATCH_BLOCKS):
            self._publish()

    def flush(self) -> bool:
        """Publish at most BATCHES_A_TURN batches. Return whether changes still wait."""
        for _ in range(BATCHES_A_TURN):
            if not self._waiting:
                break
            self._publish()
        return bool(self._waiting)

    def flush_all(self) -> EventMark:
        """Publish everything, for a snapshot, which must be of one sequence."""
        while self.flush():
            pass
        return self.mark

    def _publish(self) -> None:
        changes = [self._waiting.popleft() for _ in range(min(BATCH_BLOCKS, len(self._waiting)))]
        events: list[KvEvent] = []
        for tier, run in groupby(changes, _tier):
            events += to_kv_events((event for _, event in run), self._block_size, tier)
        self._sequence += 1
        self._publisher.publish(self._sequence, EVENT_BATCH.encode(EventBatch(self._wall(), events, 0)))
        if not self._waiting:
            self.mark = EventMark(self._sequence, *self._digests())

    def close(self) -> None:
        """Publish no more."""
        self._publisher.close()

    def validate(self) -> None:
        """Raise AssertionError if the mark is not that of what can be found."""
        assert self._waiting or (self.mark.host_digest, self.mark.disk_digest) == self._digests(), (
            "an unpublished change"
        )
        assert self._waiting or self.mark.sequence == self._sequence
