"""KV events over a Bus: NATS, or its twin inside one process. Two planes publish in the same way:

    headrace.NS.events.SOURCE    [sequence, u64 big-endian][payload], for who listens now

and differ in who keeps batches for a replay:

    nats         the source: on headrace.NS.events.SOURCE.replay it answers a ReplayRequest with a ReplayPage, until the
                 last one
    jetstream    a stream of the server, which is read without the source (jetstream.py)

The limits: a batch is lost if NATS is away, or has too much unread; so is one that comes while UNREAD_LIMIT_BATCHES or
the bytes of a ReceiveQueue wait. The receiver sees a gap in the sequences, as over ZMQ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from shared import subjects
from shared.bus.contract import Bus, Message, Receive
from shared.bus.replay_buffer import ReplayBuffer, ReplayedBatches
from shared.errors import BusDown, PayloadTooLarge, ProtocolError, RequestTimeout, Unavailable
from shared.messages.cards import EVENTS_IN_STREAM, EVENTS_ON_NATS, EventSource
from shared.messages.kv_events import REPLAY_PAGE, REPLAY_REQUEST, ReplayPage, ReplayRequest
from shared.rate_limited_log import RateLimitedLog

UNREAD_LIMIT_BATCHES = 20_000
QUESTIONS_LIMIT = 1024
"""The maximum number of questions for a page that wait; a further one is ignored, and times out at its sender."""
PAGE_BYTES = 512 << 10
"""The size after which a page of a replay has no further batch: a page of several is no larger than the smallest
payload that `headrace check` does not find bad."""
BATCH_BYTES = 16
"""The most that a batch of a page has in addition to its payload."""
_SEQUENCE_BYTES = 8

ReadStream = Callable[[str, str, int], Awaitable[list[tuple[int, bytes]]]]
"""Called with a stream, a subject and a sequence: returns the batches from there on, or none if the stream does not
reach so far back. Raises Unavailable."""


class HeldSubscription:
    """A subscription that is opened and closed by code that cannot wait."""

    def __init__(self, bus: Bus, subject: str, receive: Receive, pending_limit: int) -> None:
        self._closing = asyncio.Event()
        hold = self._hold(bus, subject, receive, pending_limit)
        self.task = asyncio.get_running_loop().create_task(hold, name=f"hold {subject}")

    def close(self) -> None:
        self._closing.set()

    async def _hold(self, bus: Bus, subject: str, receive: Receive, pending_limit: int) -> None:
        try:
            subscription = await bus.subscribe(subject, receive, pending_limit=pending_limit)
        except BusDown:  # the process ends
            return
        try:
            await self._closing.wait()
        finally:
            await subscription.unsubscribe()


class NatsEventPublisher:
    """The sending end of one source. Without a `stream` it keeps the last batches, and answers for them."""

    def __init__(self, bus: Bus, subject: str, stream: str, ring: ReplayBuffer, unsent: Callable[[], None]) -> None:
        """`unsent` is called for each batch that is lost because it cannot be sent now."""
        self._bus = bus
        self._subject = subject
        self._ring = ring
        self._unsent = unsent
        self._closed = False
        self._too_large = RateLimitedLog()
        self.replies: HeldSubscription | None = None
        """The subscription for questions. None if a stream keeps the batches."""
        replay = subjects.event_replay(subject)
        if not stream:
            self.replies = HeldSubscription(bus, replay, self._asked, QUESTIONS_LIMIT)
        self.source = EventSource(
            publish=EVENTS_ON_NATS + subject, replay=EVENTS_IN_STREAM + stream if stream else EVENTS_ON_NATS + replay
        )

    def publish(self, sequence: int, payload: bytes) -> None:
        if self._closed:
            return
        try:
            self._bus.publish_now(self._subject, sequence.to_bytes(_SEQUENCE_BYTES, "big") + payload)
        except PayloadTooLarge as wrong:
            self._unsent()
            self._too_large.error("a batch of KV events was not sent; the server's max_payload bounds it", wrong)
            return
        except BusDown:
            self._unsent()
        if self.replies is not None:
            self._ring.append(sequence, payload)

    def close(self) -> None:
        self._closed = True
        if self.replies is not None:
            self.replies.close()

    async def _asked(self, message: Message) -> None:
        if self._closed:
            return
        asked = REPLAY_REQUEST.decode(message.payload, message.headers)
        batches = self._ring.since(asked.first)
        page: list[tuple[int, bytes]] = []
        size_bytes = 0
        for batch in batches:
            size_bytes += len(batch[1]) + BATCH_BYTES
            if page and size_bytes > PAGE_BYTES:
                break
            page.append(batch)
        try:
            await self._answer(message, ReplayPage(page, last=len(page) == len(batches)))
        except PayloadTooLarge:  # a batch that came while NATS was away; without it the asker takes a snapshot
            await self._answer(message, ReplayPage([], last=True))

    async def _answer(self, message: Message, page: ReplayPage) -> None:
        await self._bus.publish(
            message.reply, REPLAY_PAGE.encode(page, message.headers), headers=message.reply_headers()
        )


class NatsEventSubscription:
    """The receiving end of one source."""

    def __init__(
        self, bus: Bus, source: EventSource, receive: Callable[[int, bytes], None], read_stream: ReadStream
    ) -> None:
        """Raise ProtocolError if the source's address is none."""
        self._bus = bus
        self._source = source
        self._subject = source.publish.removeprefix(EVENTS_ON_NATS)
        self._receive = receive
        self._read_stream = read_stream
        self._closed = False
        self.malformed = 0
        subjects.check(self._subject)
        self.batches = HeldSubscription(bus, self._subject, self._take, UNREAD_LIMIT_BATCHES)

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return the batches from `first` on. Raise Unavailable, or ProtocolError."""
        replay = self._source.replay
        if self._closed or not replay:
            raise RequestTimeout(f"{self._source.publish} has no replay")
        try:
            async with asyncio.timeout(timeout_s):
                if self._source.stored:
                    return await self._read_stream(replay.removeprefix(EVENTS_IN_STREAM), self._subject, first)
                return await self._ask(replay.removeprefix(EVENTS_ON_NATS), first, timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"no replay from {replay} in {timeout_s:g} s") from None

    def close(self) -> None:
        self._closed = True
        self.batches.close()

    async def _take(self, message: Message) -> None:
        if self._closed:
            return
        if len(message.payload) < _SEQUENCE_BYTES:
            self.malformed += 1
            raise ProtocolError(f"a KV event of {len(message.payload)} bytes")
        sequence, payload = split_message(message.payload)
        self._receive(sequence, payload)

    async def _ask(self, subject: str, first: int, timeout_s: float) -> list[tuple[int, bytes]]:
        """Ask the source, page after page."""
        replayed = ReplayedBatches(first)
        while True:
            question = REPLAY_REQUEST.encode(ReplayRequest(first))
            answer = await self._bus.request(subject, question, timeout_s=timeout_s)
            page = REPLAY_PAGE.decode(answer.payload, answer.headers)
            for sequence, payload in page.batches:
                replayed.append(sequence, payload)
            if page.last:
                return replayed.batches
            if not page.batches:
                raise ProtocolError(f"an empty page of a replay from {subject}")
            first = page.batches[-1][0] + 1


class NatsEventBus:
    """Opens both ends of event streams over `bus`. The sources of a process have `name` in their subjects, which is one
    token; with `stream`, that stream keeps their batches."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        name: str,
        *,
        stream: str = "",
        read_stream: ReadStream,
        unsent: Callable[[], None] = lambda: None,
    ) -> None:
        """`read_stream` is for the replays of subscriptions, `unsent` for publishers."""
        self._bus = bus
        self._namespace = namespace
        self._name = name
        self._stream = stream
        self._read_stream = read_stream
        self._unsent = unsent
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def malformed(self) -> int:
        return self._bus.malformed

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> NatsEventPublisher:  # noqa: ARG002
        """Open a publisher, in a running event loop. Its subject is its topic."""
        subject = subjects.events(self._namespace, f"{self._name}-{next(self._numbers)}")
        publisher = NatsEventPublisher(self._bus, subject, self._stream, ReplayBuffer(ring_batches), self._unsent)
        if publisher.replies is not None:
            self._own(publisher.replies.task)
        return publisher

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> NatsEventSubscription:
        """Subscribe, in a running event loop. Raise ProtocolError if the address of `source` is none."""
        subscription = NatsEventSubscription(self._bus, source, receive, self._read_stream)
        self._own(subscription.batches.task)
        return subscription

    async def close(self) -> None:
        """Close everything that is still open, but not the bus."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def split_message(message: bytes) -> tuple[int, bytes]:
    """Return the sequence and the payload of a message of at least eight bytes."""
    return int.from_bytes(message[:_SEQUENCE_BYTES], "big"), message[_SEQUENCE_BYTES:]


async def no_stream(stream: str, _subject: str, _first: int) -> list[tuple[int, bytes]]:
    """Raise Unavailable: a ReadStream without streams."""
    raise Unavailable(f"no stream {stream}")
