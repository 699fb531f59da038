"""The contract of event streams: the in-process fake, and each plane as a process has it. test_zmq_events.py,
test_nats_events.py and test_jetstream.py test what only one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.bus.contract import EventBus, EventPublisher, EventSubscription
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.bus.nats_events import NatsEventBus, no_stream
from shared.errors import BusDown, Unavailable
from tests.event_planes import event_planes

DEADLINE_S = 60.0


@pytest.fixture(
    params=["memory", "zmq", "curve", "sockets", "sockets of long names", "nats over memory", "nats", "jetstream"]
)
async def events(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EventBus]:
    kind: str = request.param
    directory = tmp_path / ("d" * (120 if "long" in kind else 1))
    directory.mkdir()
    if kind == "memory":
        yield MemoryEventBus(MemoryBroker().events)
    elif kind == "nats over memory":
        over_memory = NatsEventBus(MemoryBus(MemoryBroker()), "test", "test-1", read_stream=no_stream)
        yield over_memory
        await over_memory.close()
    elif kind in ("nats", "jetstream"):
        url = request.getfixturevalue("jetstream_url" if kind == "jetstream" else "nats_url")
        async with event_planes("jetstream" if kind == "jetstream" else "nats", url) as opened:
            yield opened
    else:
        sockets = str(directory) if "sockets" in kind else ""
        async with event_planes("zmq", directory=sockets, encrypted=kind == "curve") as opened:
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


async def replayed(subscription: EventSubscription, first: int, last: int) -> list[tuple[int, bytes]]:
    """The batches from `first` to `last`: a server may have passed `last` on before it has stored it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(BusDown):  # a connection that is made for the first source
                batches = await subscription.replay(first, timeout_s=DEADLINE_S)
                if batches and batches[-1][0] == last:
                    return batches
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


async def test_a_replay_has_what_is_kept(events: EventBus) -> None:
    publisher, subscription, _, first = await open_pair(events, topic="t", ring_batches=10)
    for sequence in range(first, first + 100):
        publisher.publish(sequence, str(sequence).encode())
    kept = [(sequence, str(sequence).encode()) for sequence in range(first + 90, first + 100)]
    assert await replayed(subscription, first + 95, first + 99) == kept[5:]
    assert await subscription.replay(first + 90, timeout_s=DEADLINE_S) == kept
    everything = await subscription.replay(0, timeout_s=DEADLINE_S)
    assert everything[-10:] == kept
    if publisher.source.replay.startswith("jetstream:"):  # the stream has limits of its own
        assert everything[-99:] == [(sequence, str(sequence).encode()) for sequence in range(first + 1, first + 100)]
    else:
        assert len(everything) == 10
    assert await subscription.replay(first + 100, timeout_s=DEADLINE_S) == []
    subscription.close()
    publisher.close()


async def test_replays_at_the_same_time_each_get_their_own(events: EventBus) -> None:
    publisher, subscription, _, first = await open_pair(events)
    for sequence in range(first, first + 50):
        publisher.publish(sequence, b"x")
    await replayed(subscription, first, first + 49)
    starts = range(first, first + 5)
    replays = await asyncio.gather(*(subscription.replay(start, timeout_s=DEADLINE_S) for start in starts))
    assert [replay[0][0] for replay in replays] == list(starts)
    subscription.close()
    publisher.close()


async def test_a_closed_source_has_no_replay_unless_a_stream_keeps_its_batches(events: EventBus) -> None:
    publisher, subscription, _, first = await open_pair(events)
    publisher.close()
    if publisher.source.replay.startswith("jetstream:"):
        assert await replayed(subscription, first - 1, first - 1) == [(first - 1, b"first")]
    else:
        with pytest.raises(Unavailable):
            await subscription.replay(0, timeout_s=0.1)
    subscription.close()


async def test_after_a_restart_of_the_source_a_replay_has_nothing_from_before(events: EventBus) -> None:
    publisher, subscription, batches, first = await open_pair(events)
    for sequence in range(first, first + 20):
        publisher.publish(sequence, b"old")
    await batches.wait(first + 19)
    publisher.publish(0, b"new")
    publisher.publish(1, b"new")
    assert await replayed(subscription, 0, 1) == [(0, b"new"), (1, b"new")]
    assert await subscription.replay(1, timeout_s=DEADLINE_S) == [(1, b"new")]
    assert await subscription.replay(2, timeout_s=DEADLINE_S) == []
    subscription.close()
    publisher.close()


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
