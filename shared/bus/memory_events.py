"""The KV events inside one process: twins that behave as ZMQ does.

MemoryEvents         knows the publishers by endpoint; `mute` and `unmute` lose batches as a high-water mark does
└── MemoryEventBus   one service's: opens publishers and subscriptions
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count

from shared.bus.delivery import Delivery, next_turn
from shared.bus.replay_buffer import ReplayBuffer
from shared.errors import RequestTimeout
from shared.messages.cards import EventSource


class MemoryEvents:
    """The sources of one process, by their endpoints."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self._publishers: dict[str, MemoryEventPublisher] = {}
        self._names = count()

    def open(self, topic: str, ring_batches: int, owner: str) -> MemoryEventPublisher:
        """Return a new publisher with its own endpoint."""
        endpoint = f"memory://{next(self._names)}"
        publisher = MemoryEventPublisher(self, endpoint, topic, ReplayBuffer(ring_batches), owner)
        self._publishers[endpoint] = publisher
        return publisher

    def publisher(self, endpoint: str) -> MemoryEventPublisher | None:
        """Return the publisher at `endpoint`, if it is open."""
        return self._publishers.get(endpoint)

    def close(self, endpoint: str) -> None:
        self._publishers.pop(endpoint, None)

    def mute(self, source: EventSource) -> None:
        """Lose what `source` publishes from now on. Its replay buffer still keeps the batches."""
        self._publishers[source.publish].muted = True

    def unmute(self, source: EventSource) -> None:
        self._publishers[source.publish].muted = False


class MemoryEventPublisher:
    """The sending end of one source, with its subscriptions."""

    def __init__(self, events: MemoryEvents, endpoint: str, topic: str, ring: ReplayBuffer, owner: str) -> None:
        self._events = events
        self.ring = ring
        self.owner = owner
        self.muted = False
        self.listeners: list[MemoryEventSubscription] = []
        self.source = EventSource(publish=endpoint, replay=endpoint, topic=topic, epoch=True, digest=True)

    def publish(self, sequence: int, payload: bytes) -> None:
        self.ring.append(sequence, payload)
        if self.muted:
            return
        for listener in self.listeners:
            batch = partial(next_turn, listener.deliver, sequence, payload)
            self._events.delivery(self.owner, listener.owner, "events", batch)

    def close(self) -> None:
        self._events.close(self.source.publish)
        self.listeners.clear()


class MemoryEventSubscription:
    """The receiving end of one source's KV events."""

    malformed = 0

    def __init__(
        self, events: MemoryEvents, source: EventSource, receive: Callable[[int, bytes], None], owner: str
    ) -> None:
        self._events = events
        self._source = source
        self._receive = receive
        self.owner = owner
        self.open = True
        publisher = events.publisher(source.publish)
        if publisher is not None:
            publisher.listeners.append(self)

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        publisher = self._events.publisher(self._source.replay)
        if publisher is None or not self.open:
            raise RequestTimeout(f"no replay from {self._source.replay} in {timeout_s:g} s")
        answer: asyncio.Future[list[tuple[int, bytes]]] = asyncio.get_running_loop().create_future()
        question = partial(self._replay, publisher, first, answer)
        self._events.delivery(self.owner, publisher.owner, "replay", partial(next_turn, question))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout(f"no replay from {self._source.replay} in {timeout_s:g} s") from None

    def _replay(
        self, publisher: MemoryEventPublisher, first: int, answer: asyncio.Future[list[tuple[int, bytes]]]
    ) -> None:
        """Answer at the publisher; the answer travels back the same way."""

        def arrived(batches: list[tuple[int, bytes]]) -> None:
            if not answer.done():
                answer.set_result(batches)

        self._events.delivery(publisher.owner, self.owner, "replay", partial(arrived, publisher.ring.since(first)))

    def close(self) -> None:
        self.open = False
        publisher = self._events.publisher(self._source.publish)
        if publisher is not None and self in publisher.listeners:
            publisher.listeners.remove(self)

    def deliver(self, sequence: int, payload: bytes) -> None:
        """Deliver a batch that has arrived."""
        if self.open:
            self._receive(sequence, payload)


class MemoryEventBus:
    """The EventBus of `shared.bus.contract` for one process. `name` is what a `Delivery` sees."""

    malformed = 0

    def __init__(self, events: MemoryEvents, name: str = "") -> None:
        self._events = events
        self._name = name
        self._subscriptions: list[MemoryEventSubscription] = []

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> MemoryEventPublisher:
        return self._events.open(topic, ring_batches, self._name)

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> MemoryEventSubscription:
        subscription = MemoryEventSubscription(self._events, source, receive, self._name)
        self._subscriptions = [*(each for each in self._subscriptions if each.open), subscription]
        return subscription

    def close(self) -> None:
        """Close all subscriptions: nothing arrives here any longer."""
        for subscription in self._subscriptions:
            subscription.close()
