"""The bus: requests and streams over NATS, KV events over ZMQ or NATS.

This file is the contract. `shared/bus/nats_bus.py`, `shared/bus/zmq_events.py` and `shared/bus/nats_events.py` are the
real implementations, `shared/bus/memory_bus.py` and `shared/bus/memory_events.py` their twins inside one process. All
pass `tests/shared/bus/test_contract.py` or `tests/shared/bus/test_events.py`.

The contract is a file of its own, so that what a service may rely on is one page and importing it brings no back end
along.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from msgspec import Struct

from shared.messages.cards import EventSource
from shared.messages.codec import JSON_HEADER, is_json

LAST_HEADER = "Headrace-Last"
"""The header that is "true" on the last message of a streamed reply."""


class Message(Struct, frozen=True):
    """One message, as a subscriber receives it."""

    subject: str
    payload: bytes
    reply: str = ""
    """The subject for the answer. Empty if no answer is wanted."""
    headers: Mapping[str, str] = {}

    def reply_headers(self, *, last: bool = False) -> Mapping[str, str]:
        """Return the headers of a reply in this message's encoding; `last`: it ends a streamed reply."""
        headers = JSON_HEADER if is_json(self.headers) else {}
        return {**headers, LAST_HEADER: "true"} if last else headers


class SubscriptionStatistics(Struct, frozen=True):
    """Counts of messages since the subscription was made."""

    received: int
    dropped: int
    """The messages dropped because the receiver was too slow and the limit was reached."""
    pending: int
    failed: int = 0
    """The messages for which `receive` raised; each was logged."""
    malformed: int = 0
    """The messages that `receive` could not read: it raised ProtocolError. Logged at most once a minute."""


Receive = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    """A live subscription. It delivers messages one at a time, in order."""

    def statistics(self) -> SubscriptionStatistics: ...

    async def unsubscribe(self) -> None:
        """End the subscription. Return when the messages received before have been delivered. Idempotent."""
        ...


class Bus(Protocol):
    """Publish, subscribe, request and stream.

    Every call may raise BusDown while NATS is away, and PayloadTooLarge for a payload over the limit. Subscriptions
    survive an outage of any length.
    """

    @property
    def connected(self) -> bool: ...

    @property
    def connections(self) -> int:
        """The number of connections so far. Messages that were published just before it grew may be lost."""
        ...

    @property
    def malformed(self) -> int:
        """The number of unreadable messages so far, of all subscriptions that there have been."""
        ...

    async def confirm(self, connections: int) -> None:
        """Wait until NATS has everything that was published since `connections` had that value.

        Raise BusDown if a part of it may be lost.
        """
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        no_responders: Callable[[], None] | None = None,
    ) -> None:
        """Publish a message to all subscribers of `subject`.

        With `no_responders`, the message has a reply subject, and `no_responders()` is called once if the server
        answers that no process listens. This costs one small inbox entry; their number is limited.
        """
        ...

    def publish_now(self, subject: str, payload: bytes) -> None:
        """Publish a message without waiting. Raise BusDown also if too much waits to be sent: then it is lost."""
        ...

    async def subscribe(
        self,
        subject: str,
        receive: Receive,
        *,
        queue: str = "",
        pending_limit: int = 65536,
        dropped: Callable[[int], None] | None = None,
        overflowed: Callable[[Message], None] | None = None,
    ) -> Subscription:
        """Deliver messages to `receive`, one at a time. Members of the same `queue` share them.

        While `pending_limit` messages wait, a new one is dropped: it is counted, `dropped(count_so_far)` and
        `overflowed(message)` are called. If `receive` raises ProtocolError, the message counts as malformed, and is
        logged at most once a minute. Any other exception (also PayloadTooLarge, since the answer is ours) counts as
        failed, and is logged with its traceback. The subscription lives on in both cases.
        """
        ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        """Send a request and return its one answer. Raise NoResponders (at once) or RequestTimeout."""
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
        """Send a request, and yield its answers until one has LAST_HEADER. Leaving the context drops the inbox.

        Raise NoResponders, RequestTimeout after `idle_timeout_s` without an answer, or Overloaded if `pending_limit`
        answers wait unread.
        """
        ...

    async def drain(self) -> None:
        """Deliver what has come, flush what was published, close. Idempotent."""
        ...


class EventPublisher(Protocol):
    """The sending end of one source's KV events, with a bounded buffer for replay."""

    @property
    def source(self) -> EventSource:
        """The endpoints, for the address book."""
        ...

    def publish(self, sequence: int, payload: bytes) -> None:
        """Publish a batch without blocking. The caller numbers the batches; each number is one higher."""
        ...

    def close(self) -> None: ...


class EventSubscription(Protocol):
    """The receiving end of one source's KV events. The callback given to `subscribe` gets (sequence, payload).

    Sequences may have gaps.
    """

    @property
    def malformed(self) -> int:
        """The number of messages so far without a sequence and a payload."""
        ...

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return the batches from `first` on that the source, or a stream, still has, in order. Raise Unavailable:
        RequestTimeout, or sooner if there is nothing to wait for."""
        ...

    def close(self) -> None: ...


class EventBus(Protocol):
    """Opens both ends of event streams."""

    @property
    def malformed(self) -> int:
        """The number of unreadable replay requests so far, to all publishers opened here."""
        ...

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> EventPublisher: ...

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> EventSubscription: ...
