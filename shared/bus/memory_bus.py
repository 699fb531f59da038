"""The bus inside one process: a twin that behaves as NATS does.

    MemoryBroker    knows the subscriptions, and delivers in the order of publishing
    └── MemoryBus   one endpoint, as a service has one; `disconnect` and `reconnect` take NATS away from it

It is deterministic: queue groups take turns, nothing is random, and receivers run in the order in which the event loop
wakes them. A simulation gives the broker its own Delivery, which may deliver late, twice or never.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

from shared import subjects
from shared.bus.contract import Message, Receive, SubscriptionStatistics
from shared.bus.delivery import Delivery, deliver_at_once, next_turn
from shared.bus.inbox import NO_RESPONDERS, ReplyInbox
from shared.bus.memory_events import MemoryEvents
from shared.bus.receive_queue import ReceiveQueue
from shared.errors import BusDown, PayloadTooLarge
from shared.rate_limited_log import RateLimitedLog

SUBJECTS_LIMIT = 4096
"""The number of subjects whose subscriptions are remembered. An inbox that is gone is one too."""


def matches(pattern: str, subject: str) -> bool:
    """Match a subject as NATS does: `*` stands for one token, a last `>` for one or more."""
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

    def matches(self, subject: str) -> bool:
        """Return whether a message to `subject` is for this subscription while its bus is connected."""
        return subject == self.subject if self._exact else matches(self.subject, subject)

    def statistics(self) -> SubscriptionStatistics:
        return self.receiver.statistics()

    def deliver(self, message: Message) -> None:
        """Deliver a message, unless the connection was lost meanwhile."""
        if self.bus.connected:
            self.receiver.offer(message)

    async def unsubscribe(self) -> None:
        self.bus.broker.remove(self)
        await self.receiver.drain()


class MemoryBroker:
    """Delivers each message to every connected subscription that matches, and to one member of each queue group."""

    def __init__(self, delivery: Delivery = deliver_at_once) -> None:
        self.delivery = delivery
        self.events = MemoryEvents(delivery)
        """The KV events of the same process."""
        self._subscriptions: list[MemorySubscription] = []
        self._matching: dict[str, list[MemorySubscription]] = {}
        """Subject → the subscriptions that match it, found since the last subscription was added or removed. At most
        SUBJECTS_LIMIT; then they are looked for again."""
        self._inboxes: dict[str, tuple[MemoryBus, Callable[[Message], None]]] = {}
        self._turns: dict[tuple[str, str], int] = {}

    def join(self, bus: MemoryBus, inbox: str, take: Callable[[Message], None]) -> None:
        """Deliver messages to `inbox`, or one token below it if it ends in a dot, to `take`."""
        self._inboxes[inbox] = (bus, take)

    def leave(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)
        self._matching.clear()

    def subscriptions(self, bus: MemoryBus) -> list[MemorySubscription]:
        """Return the live subscriptions of `bus`."""
        return [subscription for subscription in self._subscriptions if subscription.bus is bus]

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._matching.clear()

    def publish(self, message: Message, sender: MemoryBus) -> None:
        """Deliver a message. If no process listens and an answer is wanted, answer with `Status: 503` as NATS does."""
        subject = message.subject
        found = self._inboxes.get(subject) or self._inboxes.get(subject[: subject.rfind(".") + 1])
        if found is not None and found[0].connected:
            bus, take = found
            self.delivery(sender.name, bus.name, subject, partial(_answer, bus, take, message))
            return
        receivers = self._receivers(subject)
        for subscription in receivers:
            self.delivery(sender.name, subscription.bus.name, subject, partial(subscription.deliver, message))
        if not receivers and message.reply:
            self.publish(Message(message.reply, b"", "", NO_RESPONDERS), sender)

    @property
    def remembered(self) -> int:
        """The number of subjects whose subscriptions are remembered."""
        return len(self._matching)

    def disconnect(self, bus: MemoryBus) -> None:
        """Take NATS away from `bus`: it receives nothing, and its calls and its waiting requests raise BusDown."""
        bus.disconnect()

    def reconnect(self, bus: MemoryBus) -> None:
        """Give NATS back to `bus`; its subscriptions live on."""
        bus.reconnect()

    def hang(self, bus: MemoryBus) -> None:
        """Make the connection of `bus` dead but not broken: what it sends is lost until it is disconnected."""
        bus.hung = True

    def _receivers(self, subject: str) -> list[MemorySubscription]:
        matching = self._matching.get(subject)
        if matching is None:
            matching = [subscription for subscription in self._subscriptions if subscription.matches(subject)]
            if len(self._matching) >= SUBJECTS_LIMIT:
                self._matching.clear()
            self._matching[subject] = matching
        everyone: list[MemorySubscription] = []
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for subscription in matching:
            if not subscription.bus.connected:
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


def _answer(bus: MemoryBus, take: Callable[[Message], None], message: Message) -> None:
    """Deliver an answer in the next turn of the event loop, because the caller may still be sending."""
    if bus.connected:
        next_turn(take, message)


class MemoryBus:
    """The bus of `shared.bus.contract`: one endpoint of a MemoryBroker. `name` is what a `Delivery` sees."""

    def __init__(self, broker: MemoryBroker, name: str = "", *, payload_limit_bytes: int = 4 << 20) -> None:
        self.broker = broker
        self.name = name
        self.replies = ReplyInbox()
        self._payload_limit_bytes = payload_limit_bytes
        self._unreadable = RateLimitedLog()
        self._state: Literal["connected", "away", "closed"] = "connected"
        self.connections = 1
        self.hung = False
        broker.join(self, self.replies.prefix, self.replies.deliver)

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
        no_responders: Callable[[], None] | None = None,
    ) -> None:
        self._check(payload)
        self._send(subject, payload, headers, "" if no_responders is None else self.replies.probe(no_responders))

    def publish_now(self, subject: str, payload: bytes) -> None:
        self._check(payload)
        self._send(subject, payload, None, "")

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
        overflowed: Callable[[Message], None] | None = None,
    ) -> MemorySubscription:
        subjects.check(subject, wildcards=True)
        if self._state == "closed":
            raise BusDown("the bus is closed")
        receiver = ReceiveQueue(
            subject,
            receive,
            pending_limit=pending_limit,
            dropped=dropped,
            overflowed=overflowed,
            unreadable=self._unreadable,
        )
        subscription = MemorySubscription(self, subject, queue, receiver)
        self.broker.add(subscription)
        return subscription

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        self._check(payload)

        async def send(reply: str) -> None:
            self._send(subject, payload, headers, reply)

        return await self.replies.request(subject, timeout_s, send)

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
        self.broker.join(self, stream.inbox, stream.deliver)
        try:
            self._send(subject, payload, headers, stream.inbox)
            yield stream.messages(idle_timeout_s)
        finally:
            self.broker.leave(stream.inbox)
            self.replies.close_stream(stream)

    async def drain(self) -> None:
        for subscription in self.broker.subscriptions(self):
            await subscription.unsubscribe()
        self._state = "closed"
        self.broker.leave(self.replies.prefix)
        self.replies.fail(BusDown("the bus is closed"))

    def disconnect(self) -> None:
        """Lose the connection; `MemoryBroker.disconnect` explains it."""
        if self._state == "connected":
            self._state = "away"
            self.hung = False
            self.replies.fail(BusDown("the connection was lost"))

    def reconnect(self) -> None:
        """Restore the connection; `MemoryBroker.reconnect` explains it."""
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
