"""The events of one layout, through a publisher of the in-process bus."""

from __future__ import annotations

from functools import reduce
from operator import xor

from services.kvbm.layout.event_log import BACKLOG_CHANGES, BATCH_BLOCKS, BATCHES_A_TURN, EventLog
from services.kvbm.tiers.actions import TierEvent
from shared.blocks import Content, ContentEvicted, ContentStored
from shared.bus.memory_bus import MemoryBroker
from shared.bus.memory_events import MemoryEventBus
from shared.hashing import event_hash
from shared.messages.kv_events import EVENT_BATCH, BlockRemoved, BlockStored
from tests.kvbm.chains import chain

TURN_BLOCKS = BATCH_BLOCKS * BATCHES_A_TURN


class Rig:
    """A log, and the batches that it published."""

    def __init__(self) -> None:
        self.found: dict[str, set[int]] = {"host": set(), "disk": set()}
        self._publisher = MemoryEventBus(MemoryBroker().events).open_publisher()
        self.log = EventLog(self._publisher, 1, self._digests, lambda: 17.0)

    def _digests(self) -> tuple[int, int]:
        return reduce(xor, self.found["host"], 0), reduce(xor, self.found["disk"], 0)

    def add(self, *events: TierEvent) -> None:
        for tier, event in events:
            self.found[tier] ^= {event_hash(event.content.key)}
        self.log.add(list(events))
        self.log.validate()

    @property
    def batches(self) -> list[int]:
        """Return the number of blocks of each batch."""
        payloads = [payload for _, payload in self._publisher.ring.since(0)]
        return [sum(_blocks(event) for event in EVENT_BATCH.decode(payload).events) for payload in payloads]

    def events(self, sequence: int) -> list[object]:
        return list(EVENT_BATCH.decode(dict(self._publisher.ring.since(0))[sequence]).events)


def _blocks(event: object) -> int:
    assert isinstance(event, BlockStored | BlockRemoved)
    return len(event.block_hashes)


def on_disk(blocks: int) -> list[TierEvent]:
    contents = (Content(n.to_bytes(16, "little"), None, n.to_bytes(4, "little")) for n in range(blocks))
    return [("disk", ContentStored(content)) for content in contents]


def test_changes_are_published_in_order_with_their_tiers_and_the_mark_follows() -> None:
    rig = Rig()
    one, two = chain(1, 2)
    rig.add(
        ("host", ContentStored(one)),
        ("host", ContentStored(two)),
        ("disk", ContentStored(one)),
        ("host", ContentEvicted(one)),
    )
    assert rig.log.mark.sequence == -1
    assert not rig.log.flush()
    rig.log.validate()
    names: list[int | bytes] = [event_hash(one.key), event_hash(two.key)]
    assert rig.events(0) == [
        BlockStored(names, None, [1, 2], 1, medium="host_pinned"),
        BlockStored(names[:1], None, [1], 1, medium="disk"),
        BlockRemoved(names[:1], medium="host_pinned"),
    ]
    assert (rig.log.mark.sequence, rig.log.mark.host_digest, rig.log.mark.disk_digest) == (0, names[1], names[0])
    assert not rig.log.flush()
    assert len(rig.batches) == 1, "nothing changed, nothing is told"


def test_a_disk_with_many_blocks_is_published_in_turns_and_the_mark_waits() -> None:
    rig = Rig()
    rig.add(*on_disk(TURN_BLOCKS + 10))
    assert rig.log.flush()
    assert rig.batches == [BATCH_BLOCKS] * BATCHES_A_TURN
    assert rig.log.mark.sequence == -1
    mark = rig.log.flush_all()
    assert rig.batches[BATCHES_A_TURN:] == [10]
    assert mark.sequence == BATCHES_A_TURN
    rig.log.validate()


def test_adding_changes_while_very_many_wait_publishes_as_many() -> None:
    rig = Rig()
    rig.add(*on_disk(BACKLOG_CHANGES + 1))
    waiting = rig.log.waiting
    for content in chain(*range(20)):
        rig.add(("host", ContentStored(content)))
        assert rig.log.waiting <= waiting
