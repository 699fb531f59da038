"""The bus: requests and streams over NATS, KV events over ZMQ, and an in-process twin of both.

This file holds the contract. `shared/bus/nats_bus.py` and `shared/bus/zmq_events.py` are the real thing,
`shared/bus/memory_bus.py` the twin; both pass `tests/shared/bus/test_contract.py` and
`tests/shared/bus/test_events.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from shared.messages import JSON_HEADER, EventSource, is_json

LAST_HEADER = "Headrace-Last"
"""Set to "true" on the last message of a streamed reply."""


class Message(Struct, frozen=True):
    """One message as a subscriber gets it."""

    subject: str
    payload: bytes
    reply: str = ""
    """Where to answer; empty: no answer is wanted."""
    headers: Mapping[str, str] = {}

    def reply_headers(self, *, last: bool = False) -> Mapping[str, str]:
        """Return the headers of a reply in this message's encoding; `last`: it ends a streamed reply."""
        headers = JSON_HEADER if is_json(self.headers) else {}
        return {**headers, LAST_HEADER: "true"} if last else headers


class SubscriptionStatistics(Struct, frozen=True):
    """Counts since the subscription was made."""

    received: int
    dropped: int
    """Lost because the receiver was too slow and the bound was reached."""
    pending: int
    failed: int = 0
    """Messages on which `receive` raised; each was logged."""
    malformed: int = 0
    """Messages that `receive` could not read: it raised ProtocolError. Logged once a minute."""


Receive = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    """A live subscription; messages are handed over one at a time, in order."""

    def statistics(self) -> SubscriptionStatistics: ...

    async def unsubscribe(self) -> None:
        """No new messages; returns when those already taken have been handed over. Idempotent."""
        ...


class Bus(Protocol):
    """Publish, subscribe, request and stream.

    Every call may raise BusDown while NATS is away, and PayloadTooLarge over the payload limit. Subscriptions survive
    an outage of any length by themselves.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def connections(self) -> int:
        """How often it has connected so far. What was published just before that changed may be lost."""
        ...

    @property
    def malformed(self) -> int:
        """Messages so far that could not be read, whatever has become of their subscriptions."""
        ...

    async def confirm(self, connections: int) -> None:
        """Returns when NATS has all that was published since `connections` had that value. Raises BusDown where a part
        of it may be lost."""
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """Send to whoever listens. With `gone`, the message carries a reply subject, and `gone()` is called once if
        the server answers that nobody listens (the probe costs one small inbox entry, bounded in number)."""
        ...

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
        over: Callable[[Message], None] | None = None,
    ) -> Subscription:
        """Deliver to `receive`, one message at a time. At `pending_limit` waiting messages new ones are dropped,
        counted and told to `dropped(count_so_far)`, and given to `over(message)`. ProtocolError out of `receive` says
        that a message cannot be read: it is counted as malformed, and logged in one line once a minute. Any other
        exception (PayloadTooLarge is one: the answer was ours) is logged whole and counted as failed. The subscription
        lives on. Members of the same `queue` share the messages."""
        ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        """One answer. Raises NoResponders (at once) or RequestTimeout."""
        ...

    def stream(
        self,
        subject: str,
        payload: bytes,
        *,
        idle_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        pending_limit: int = 8192,
    ) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Answers until one carries LAST_HEADER. Raises NoResponders, RequestTimeout after `idle_timeout_s` without
        an answer, and Overloaded if `pending_limit` answers wait unread. Leaving the context drops the inbox."""
        ...

    async def drain(self) -> None:
        """Hand over what has come, flush what was published, close. Idempotent."""
        ...


class EventPublisher(Protocol):
    """The sending end of one source's KV events, with a bounded ring for replay."""

    @property
    def source(self) -> EventSource:
        """Endpoints to put into the address book."""
        ...

    def publish(self, sequence: int, payload: bytes) -> None:
        """Never blocks. Sequences grow by one; the caller owns them."""
        ...

    def close(self) -> None: ...


class EventSubscription(Protocol):
    """The receiving end: batches come as (sequence, payload) to the callback given at `subscribe`, gaps included."""

    @property
    def malformed(self) -> int:
        """Messages so far that were not topic, sequence and payload."""
        ...

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Batches from `first` on that the source still has, in order. Raises RequestTimeout."""
        ...

    def close(self) -> None: ...


class Events(Protocol):
    """Opens both ends of the event stream."""

    @property
    def malformed(self) -> int:
        """Questions so far for a replay, to all publishers opened here, that could not be read."""
        ...

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> EventPublisher: ...

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> EventSubscription: ...
