"""What can be found of one layout, told to routers: batches of KV events, and how far they are.

    changes ──▶ waiting ──flush, 1024 blocks a batch──▶ published, sequence grows ──nothing waits──▶ mark

A mark is a sequence with the tiers' digests as of it, so it is set only where nothing waits. A disk that comes up with
a million blocks is told in many turns of the loop, and until then the mark is the last one before.
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
from shared.messages import EVENT_BATCH, EventBatch, EventSource, KvEvent

BATCH_BLOCKS = 1024
"""1 to 2 ms of work."""
BATCHES_A_TURN = 8
BEHIND_CHANGES = 65_536
"""While more wait, whoever brings others pays for as many to be told: so never more wait than these and one disk's."""

_tier = itemgetter(0)


class EventMark(Struct, frozen=True):
    """How far the events are."""

    sequence: int = -1
    """Of the last batch; -1: none yet."""
    host_digest: int = 0
    disk_digest: int = 0


class EventLog:
    """Of one layout. `digests` are those of what can be found now, host and disk; `wall` is the wall clock."""

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
        """For the address book."""
        return msgspec.structs.replace(self._publisher.source, epoch=True, snapshot=True, digest=True)

    @property
    def waiting(self) -> int:
        """Changes that were not told yet."""
        return len(self._waiting)

    def add(self, events: list[TierEvent]) -> None:
        """In order, to be told at the next `flush`."""
        behind = len(self._waiting) > BEHIND_CHANGES
        self._waiting.extend(events)
        for _ in range(0, len(events) if behind else 0, BATCH_BLOCKS):
            self._publish()

    def flush(self) -> bool:
        """Tells a turn's worth; whether something waits still."""
        for _ in range(BATCHES_A_TURN):
            if not self._waiting:
                break
            self._publish()
        return bool(self._waiting)

    def flush_all(self) -> EventMark:
        """Tells everything: for a snapshot, which must be of one sequence."""
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
        """Nothing is told any more."""
        self._publisher.close()

    def validate(self) -> None:
        """Raises AssertionError where the mark is not that of what can be found."""
        assert self._waiting or (self.mark.host_digest, self.mark.disk_digest) == self._digests(), "an untold change"
        assert self._waiting or self.mark.sequence == self._sequence
