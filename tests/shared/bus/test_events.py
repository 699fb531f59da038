"""The contract of both event streams: the in-process fake and ZMQ. test_zmq_events.py tests what only ZMQ does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.contract import EventBus, EventPublisher, EventSubscription
from shared.bus.memory_bus import MemoryBroker
from shared.bus.memory_events import MemoryEventBus
from shared.bus.zmq_events import ZmqEventBus
from shared.errors import RequestTimeout

DEADLINE_S = 60.0


@pytest.fixture(params=["memory", "zmq", "curve", "sockets", "sockets of long names"])
def events(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventBus]:
    directory = tmp_path / ("d" * (120 if "long" in request.param else 1))
    directory.mkdir()
    if request.param == "memory":
        yield MemoryEventBus(MemoryBroker().events)
    else:
        sockets = str(directory) if "sockets" in request.param else ""
        with ZmqEventBus(directory=sockets, encrypted=request.param == "curve") as opened:
            yield opened
    assert not list(directory.iterdir()), "no socket is left"


class Batches:
    """Collects batches and waits for them."""

    def __init__(self) -> None:
        self.all: list[tuple[int, bytes]] = []
        self._grew = asyncio.Event()

    def receive(self, sequence: int, payload: bytes) -> None:
        self.all.append((sequence, payload))
        self._grew.set()

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, _ in self.all]

    async def wait(self, last: int) -> list[int]:
        """Until the batch `last` has come."""
        async with asyncio.timeout(DEADLINE_S):
            while last not in self.sequences:
                self._grew.clear()
                await self._grew.wait()
        return self.sequences


async def joined(publisher: EventPublisher, batches: Batches, before: int = 0) -> None:
    """Until the subscription is live: PUB drops what is sent before. Uses up sequences below `before` + 1,000,000."""
    sequence = before
    async with asyncio.timeout(DEADLINE_S):
        while not batches.all:
            publisher.publish(sequence, b"joining")
            sequence += 1
            await asyncio.sleep(0.001)


async def open_pair(
    events: EventBus, *, topic: str = "", ring_batches: int = 10_000
) -> tuple[EventPublisher, EventSubscription, Batches, int]:
    """A publisher and a subscription that hears it, and the first sequence that was not used up by joining."""
    publisher, batches = events.open_publisher(topic=topic, ring_batches=ring_batches), Batches()
    subscription = events.subscribe(publisher.source, batches.receive)
    await joined(publisher, batches)
    first = 1_000_000
    publisher.publish(first, b"first")
    await batches.wait(first)
    return publisher, subscription, batches, first + 1


@pytest.mark.parametrize("topic", ["", "kv-events@tiny"])
async def test_batches_come_in_order(events: EventBus, topic: str) -> None:
    publisher, subscription, batches, first = await open_pair(events, topic=topic)
    for sequence in range(first, first + 1000):
        publisher.publish(sequence, str(sequence).encode())
    await batches.wait(first + 999)
    assert batches.all[-1000:] == [(sequence, str(sequence).encode()) for sequence in range(first, first + 1000)]
    subscription.close()
    publisher.close()


async def test_a_gap_in_the_sequences_is_seen(events: EventBus) -> None:
    publisher, subscription, batches, first = await open_pair(events)
    for sequence in (first, first + 1, first + 5):
        publisher.publish(sequence, b"")
    await batches.wait(first + 5)
    assert batches.sequences[-3:] == [first, first + 1, first + 5]
    subscription.close()
    publisher.close()


async def test_a_replay_has_what_the_ring_holds(events: EventBus) -> None:
    publisher, subscription, _, first = await open_pair(events, topic="t", ring_batches=10)
    for sequence in range(first, first + 100):
        publisher.publish(sequence, str(sequence).encode())
    kept = [(sequence, str(sequence).encode()) for sequence in range(first + 90, first + 100)]
    assert await subscription.replay(first + 95, timeout_s=DEADLINE_S) == kept[5:]
    assert await subscription.replay(first + 90, timeout_s=DEADLINE_S) == kept
    assert await subscription.replay(0, timeout_s=DEADLINE_S) == kept
    assert await subscription.replay(first + 100, timeout_s=DEADLINE_S) == []
    subscription.close()
    publisher.close()


async def test_replays_at_the_same_time_each_get_their_own(events: EventBus) -> None:
    publisher, subscription, _, first = await open_pair(events)
    for sequence in range(first, first + 50):
        publisher.publish(sequence, b"x")
    starts = range(first, first + 5)
    replays = await asyncio.gather(*(subscription.replay(start, timeout_s=DEADLINE_S) for start in starts))
    assert [replay[0][0] for replay in replays] == list(starts)
    subscription.close()
    publisher.close()


async def test_a_replay_of_a_closed_source_times_out(events: EventBus) -> None:
    publisher, subscription, _, _ = await open_pair(events)
    publisher.close()
    with pytest.raises(RequestTimeout):
        await subscription.replay(0, timeout_s=0.1)
    subscription.close()


async def test_a_closed_subscription_hears_nothing(events: EventBus) -> None:
    publisher, subscription, batches, first = await open_pair(events)
    other = Batches()
    events.subscribe(publisher.source, other.receive)
    await joined(publisher, other, before=first)
    subscription.close()
    subscription.close()
    heard = len(batches.all)
    publisher.publish(first + 1_000_000, b"")
    await other.wait(first + 1_000_000)
    assert len(batches.all) == heard
    publisher.close()
    publisher.close()


async def test_a_muted_source_loses_batches_that_a_replay_brings_back() -> None:
    broker = MemoryBroker()
    publisher, batches = MemoryEventBus(broker.events).open_publisher(), Batches()
    subscription = MemoryEventBus(broker.events).subscribe(publisher.source, batches.receive)
    broker.events.mute(publisher.source)
    publisher.publish(0, b"lost")
    broker.events.unmute(publisher.source)
    publisher.publish(1, b"heard")
    assert await batches.wait(1) == [1]
    assert await subscription.replay(0, timeout_s=DEADLINE_S) == [(0, b"lost"), (1, b"heard")]
