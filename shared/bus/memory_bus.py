"""The bus and the KV events inside one process: what NATS and ZMQ do, without them.

    MemoryBroker      who listens to what; delivers in the order of publishing
    ├── MemoryBus     one endpoint of it, as a process has one; `disconnect` and `reconnect` take NATS away from it
    └── MemoryEvents  publishers by endpoint; `mute` and `unmute` lose batches as a high-water mark does

Deterministic: queue groups take turns, nothing is random, and receivers run in the order in which the loop wakes them.
A simulation gives the broker another Weather, which may deliver later, twice or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Literal

from shared import subjects
from shared.bus.contract import Message, Receive, SubscriptionStatistics
from shared.bus.faults import Weather, calm
from shared.bus.inbox import NO_RESPONDERS, Inbox
from shared.bus.receive_queue import ReceiveQueue
from shared.bus.replay_buffer import ReplayBuffer
from shared.errors import BusDown, PayloadTooLarge, RequestTimeout
from shared.messages import EventSource
from shared.rate_limited_log import RateLimitedLog


def matches(pattern: str, subject: str) -> bool:
    """NATS's wildcards: `*` is any one token, a last `>` is one token or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    for position, want in enumerate(wanted):
        if want == ">":
            return len(tokens) > position
        if position >= len(tokens) or want not in ("*", tokens[position]):
            return False
    return len(wanted) == len(tokens)


class MemorySubscription:
    """One subscription of one MemoryBus."""

    def __init__(self, bus: MemoryBus, subject: str, queue: str, receiver: ReceiveQueue) -> None:
        self.bus = bus
        self.subject = subject
        self.queue = queue
        self.receiver = receiver
        self._exact = "*" not in subject and not subject.endswith(">")

    def hears(self, subject: str) -> bool:
        """Whether a message to `subject` is for it, now."""
        if not self.bus.connected:
            return False
        return subject == self.subject if self._exact else matches(self.subject, subject)

    def statistics(self) -> SubscriptionStatistics:
        return self.receiver.statistics()

    def take(self, message: Message) -> None:
        """It has arrived; on a connection that was lost meanwhile, it has not."""
        if self.bus.connected:
            self.receiver.offer(message)

    async def unsubscribe(self) -> None:
        self.bus.broker.remove(self)
        await self.receiver.drain()


class MemoryBroker:
    """Delivers to every connected subscription that matches, and to one of each queue group."""

    def __init__(self, weather: Weather = calm) -> None:
        self.weather = weather
        self._subscriptions: list[MemorySubscription] = []
        self._inboxes: dict[str, tuple[MemoryBus, Callable[[Message], None]]] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self._publishers: dict[str, MemoryEventPublisher] = {}
        self._names = count()

    # --- the bus

    def join(self, bus: MemoryBus, inbox: str, take: Callable[[Message], None]) -> None:
        """Messages to `inbox`, or one token below it where it ends in a dot, go to `take`."""
        self._inboxes[inbox] = (bus, take)

    def leave(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def subscriptions(self, bus: MemoryBus) -> list[MemorySubscription]:
        """Those that `bus` made and has not ended."""
        return [subscription for subscription in self._subscriptions if subscription.bus is bus]

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def publish(self, message: Message, sender: MemoryBus) -> None:
        """Deliver; where nobody listens and an answer is wanted, the answer is NATS's `Status: 503`."""
        subject = message.subject
        found = self._inboxes.get(subject) or self._inboxes.get(subject[: subject.rfind(".") + 1])
        if found is not None and found[0].connected:
            bus, take = found
            self.weather(sender.name, bus.name, subject, partial(_answer, bus, take, message))
            return
        receivers = self._receivers(subject)
        for subscription in receivers:
            self.weather(sender.name, subscription.bus.name, subject, partial(subscription.take, message))
        if not receivers and message.reply:
            self.publish(Message(message.reply, b"", "", NO_RESPONDERS), sender)

    def disconnect(self, bus: MemoryBus) -> None:
        """Take NATS away from `bus`: it hears nothing, its calls raise BusDown, and so does what waits for answers."""
        bus.lose()

    def reconnect(self, bus: MemoryBus) -> None:
        """Give NATS back; its subscriptions live on."""
        bus.find()

    def hang(self, bus: MemoryBus) -> None:
        """The connection of `bus` is dead and has not broken: what it sends is lost, until it is disconnected."""
        bus.hung = True

    def _receivers(self, subject: str) -> list[MemorySubscription]:
        everyone: list[MemorySubscription] = []
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for subscription in self._subscriptions:
            if not subscription.hears(subject):
                continue
            if subscription.queue:
                groups.setdefault((subscription.subject, subscription.queue), []).append(subscription)
            else:
                everyone.append(subscription)
        for group, members in groups.items():
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            everyone.append(members[turn % len(members)])
        return everyone

    # --- KV events

    def open(self, topic: str, ring_batches: int, owner: str) -> MemoryEventPublisher:
        """A new publisher with an endpoint of its own."""
        endpoint = f"memory://{next(self._names)}"
        publisher = MemoryEventPublisher(self, endpoint, topic, ReplayBuffer(ring_batches), owner)
        self._publishers[endpoint] = publisher
        return publisher

    def publisher(self, endpoint: str) -> MemoryEventPublisher | None:
        """The publisher at `endpoint`, if it is open."""
        return self._publishers.get(endpoint)

    def close(self, endpoint: str) -> None:
        self._publishers.pop(endpoint, None)

    def mute(self, source: EventSource) -> None:
        """Lose what `source` publishes from now on; its ring still keeps it."""
        self._publishers[source.publish].muted = True

    def unmute(self, source: EventSource) -> None:
        self._publishers[source.publish].muted = False


def _answer(bus: MemoryBus, take: Callable[[Message], None], message: Message) -> None:
    """An answer has arrived; its taker has the next turn, because who asked may still be at it."""
    if bus.connected:
        _next_turn(take, message)


class MemoryBus:
    """One endpoint of a MemoryBroker; see `shared.bus.contract.Bus`. `name` is for the weather."""

    def __init__(self, broker: MemoryBroker, name: str = "", *, payload_limit_bytes: int = 4 << 20) -> None:
        self.broker = broker
        self.name = name
        self.replies = Inbox()
        self._payload_limit_bytes = payload_limit_bytes
        self._unreadable = RateLimitedLog()
        self._state: Literal["connected", "away", "closed"] = "connected"
        self.connections = 1
        self.hung = False
        broker.join(self, self.replies.prefix, self.replies.take)

    @property
    def connected(self) -> bool:
        return self._state == "connected"

    @property
    def malformed(self) -> int:
        return self._unreadable.count

    async def confirm(self, connections: int) -> None:
        if self._state != "connected" or connections != self.connections or self.hung:
            raise BusDown("the connection was lost")

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        self._check(payload)
        self._send(subject, payload, headers, "" if gone is None else self.replies.probe(gone))

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
        over: Callable[[Message], None] | None = None,
    ) -> MemorySubscription:
        subjects.check(subject, wildcards=True)
        if self._state == "closed":
            raise BusDown("the bus is closed")
        receiver = ReceiveQueue(
            subject, receive, pending_limit=pending_limit, dropped=dropped, over=over, unreadable=self._unreadable
        )
        subscription = MemorySubscription(self, subject, queue, receiver)
        self.broker.add(subscription)
        return subscription

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        self._check(payload)
        reply, answer = self.replies.request(subject)
        try:
            self._send(subject, payload, headers, reply)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout(f"no answer from {subject} in {timeout_s:g} s") from None
        finally:
            self.replies.forget(reply)

    @asynccontextmanager
    async def stream(
        self,
        subject: str,
        payload: bytes,
        *,
        idle_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        pending_limit: int = 8192,
    ) -> AsyncIterator[AsyncIterator[Message]]:
        self._check(payload)
        stream = self.replies.stream(subject, pending_limit)
        self.broker.join(self, stream.inbox, stream.take)
        try:
            self._send(subject, payload, headers, stream.inbox)
            yield stream.messages(idle_timeout_s)
        finally:
            self.broker.leave(stream.inbox)
            self.replies.end(stream)

    async def drain(self) -> None:
        for subscription in self.broker.subscriptions(self):
            await subscription.unsubscribe()
        self._state = "closed"
        self.broker.leave(self.replies.prefix)
        self.replies.fail(BusDown("the bus is closed"))

    def lose(self) -> None:
        """See MemoryBroker.disconnect."""
        if self._state == "connected":
            self._state = "away"
            self.hung = False
            self.replies.fail(BusDown("the connection was lost"))

    def find(self) -> None:
        """See MemoryBroker.reconnect."""
        if self._state == "away":
            self._state = "connected"
            self.connections += 1

    def _check(self, payload: bytes) -> None:
        if self._state != "connected":
            raise BusDown(f"the bus is {self._state}")
        if len(payload) > self._payload_limit_bytes:
            raise PayloadTooLarge(len(payload), self._payload_limit_bytes)

    def _send(self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        subjects.check(subject)
        if self.hung:
            return
        self.broker.publish(Message(subject, payload, reply, dict(headers or {})), self)


class MemoryEventPublisher:
    """The sending end of one source, with its listeners."""

    def __init__(self, broker: MemoryBroker, endpoint: str, topic: str, ring: ReplayBuffer, owner: str) -> None:
        self._broker = broker
        self.ring = ring
        self.owner = owner
        self.muted = False
        self.listeners: list[MemoryEventSubscription] = []
        self._source = EventSource(publish=endpoint, replay=endpoint, topic=topic, epoch=True, digest=True)

    @property
    def source(self) -> EventSource:
        return self._source

    def publish(self, sequence: int, payload: bytes) -> None:
        self.ring.append(sequence, payload)
        if self.muted:
            return
        for listener in self.listeners:
            batch = partial(_next_turn, listener.take, sequence, payload)
            self._broker.weather(self.owner, listener.owner, "events", batch)

    def close(self) -> None:
        self._broker.close(self._source.publish)
        self.listeners.clear()


class MemoryEventSubscription:
    """The receiving end of one source."""

    malformed = 0

    def __init__(
        self, broker: MemoryBroker, source: EventSource, receive: Callable[[int, bytes], None], owner: str
    ) -> None:
        self._broker = broker
        self._source = source
        self._receive = receive
        self.owner = owner
        self._open = True
        publisher = broker.publisher(source.publish)
        if publisher is not None:
            publisher.listeners.append(self)

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        publisher = self._broker.publisher(self._source.replay)
        if publisher is None or not self._open:
            raise RequestTimeout(f"no replay from {self._source.replay} in {timeout_s:g} s")
        answer: asyncio.Future[list[tuple[int, bytes]]] = asyncio.get_running_loop().create_future()
        question = partial(self._replay, publisher, first, answer)
        self._broker.weather(self.owner, publisher.owner, "replay", partial(_next_turn, question))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeout(f"no replay from {self._source.replay} in {timeout_s:g} s") from None

    def _replay(
        self, publisher: MemoryEventPublisher, first: int, answer: asyncio.Future[list[tuple[int, bytes]]]
    ) -> None:
        """At the publisher's: the answer goes back the same way."""

        def arrived(batches: list[tuple[int, bytes]]) -> None:
            if not answer.done():
                answer.set_result(batches)

        self._broker.weather(publisher.owner, self.owner, "replay", partial(arrived, publisher.ring.since(first)))

    def close(self) -> None:
        self._open = False
        publisher = self._broker.publisher(self._source.publish)
        if publisher is not None and self in publisher.listeners:
            publisher.listeners.remove(self)

    def take(self, sequence: int, payload: bytes) -> None:
        """A batch has arrived."""
        if self._open:
            self._receive(sequence, payload)


def _next_turn(callback: Callable[..., None], *arguments: object) -> None:
    """As a descriptor that became readable does."""
    asyncio.get_running_loop().call_soon(callback, *arguments)


class MemoryEvents:
    """One process's way to KV events; see `shared.bus.contract.Events`. `name` is for the weather."""

    malformed = 0

    def __init__(self, broker: MemoryBroker, name: str = "") -> None:
        self._broker = broker
        self._name = name
        self._subscriptions: list[MemoryEventSubscription] = []

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> MemoryEventPublisher:
        return self._broker.open(topic, ring_batches, self._name)

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> MemoryEventSubscription:
        subscription = MemoryEventSubscription(self._broker, source, receive, self._name)
        self._subscriptions.append(subscription)
        return subscription

    def close(self) -> None:
        """Nothing arrives here any more."""
        for subscription in self._subscriptions:
            subscription.close()
