"""What only KV events over a Bus do: pages of a replay, what is lost and counted, sources that are none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from deploy.local.check.verdicts import LEAST_PAYLOAD_BYTES
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.nats_events import (
    BATCH_BYTES,
    PAGE_BYTES,
    NatsEventBus,
    NatsEventPublisher,
    NatsEventSubscription,
    no_stream,
)
from shared.errors import NoResponders, ProtocolError, RequestTimeout, Unavailable
from shared.messages.cards import EventSource
from shared.messages.kv_events import REPLAY_PAGE, REPLAY_REQUEST, ReplayPage
from tests.shared.bus.test_events import DEADLINE_S, Batches, joined

PAYLOAD_LIMIT_BYTES = 3 * PAGE_BYTES


class Pair:
    """A source and a router's subscription, each at a bus of its own."""

    def __init__(self, payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES) -> None:
        self.broker = MemoryBroker()
        self.source_bus = MemoryBus(self.broker, "source", payload_limit_bytes=payload_limit_bytes)
        self.router_bus = MemoryBus(self.broker, "router", payload_limit_bytes=payload_limit_bytes)
        self.unsent = 0
        self._sources = NatsEventBus(self.source_bus, "test", "w1", read_stream=no_stream, unsent=self._lost)
        self._routers = NatsEventBus(self.router_bus, "test", "r1", read_stream=no_stream)
        self.batches = Batches()
        self.publisher: NatsEventPublisher = self._sources.open_publisher()
        self.subscription: NatsEventSubscription = self.follow(self.publisher.source, self.batches.receive)

    def follow(self, source: EventSource, receive: Callable[[int, bytes], None]) -> NatsEventSubscription:
        return self._routers.subscribe(source, receive)

    async def close(self) -> None:
        await self._sources.close()
        await self._routers.close()

    def _lost(self) -> None:
        self.unsent += 1


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one = Pair()
    await joined(one.publisher, one.batches)
    one.publisher.publish(1_000_000, b"first")
    await one.batches.wait(1_000_000)
    yield one
    await one.close()


async def test_a_replay_comes_in_pages_that_are_not_larger_than_they_must_be(pair: Pair) -> None:
    pages: list[int] = []

    async def see(message: Message) -> None:
        pages.append(REPLAY_REQUEST.decode(message.payload).first)

    await pair.router_bus.subscribe("test-wiretap", see)
    await pair.router_bus.subscribe(subjects.event_replay(pair.publisher.source.publish.removeprefix("nats:")), see)
    sizes = [PAGE_BYTES // 2 - BATCH_BYTES, PAGE_BYTES // 2 - BATCH_BYTES, 1, 2 * PAGE_BYTES, 1]
    for number, size in enumerate(sizes, 1_000_001):
        pair.publisher.publish(number, bytes(size))
    batches = await pair.subscription.replay(1_000_001, timeout_s=DEADLINE_S)
    assert [(number, len(payload)) for number, payload in batches] == [*enumerate(sizes, 1_000_001)]
    assert pages == [1_000_001, 1_000_003, 1_000_004, 1_000_005]


@pytest.mark.parametrize("size_bytes", [1, 100, 10_000])
async def test_a_replay_is_complete_with_the_smallest_payload_that_is_not_found_bad(size_bytes: int) -> None:
    pair = Pair(LEAST_PAYLOAD_BYTES)
    count = 2 * LEAST_PAYLOAD_BYTES // max(size_bytes, 128)
    for number in range(1 << 40, (1 << 40) + count):
        pair.publisher.publish(number, bytes(size_bytes))
    await asyncio.sleep(0)  # the source subscribes
    batches = await pair.subscription.replay(0, timeout_s=DEADLINE_S)
    assert [number for number, _ in batches] == [*range(1 << 40, (1 << 40) + count)]
    await pair.close()


async def test_a_batch_is_lost_and_counted_while_nats_is_away_and_replayed_after_it(pair: Pair) -> None:
    pair.broker.disconnect(pair.source_bus)
    pair.publisher.publish(1_000_001, b"lost")
    pair.publisher.publish(1_000_002, b"lost")
    assert pair.unsent == 2
    pair.broker.reconnect(pair.source_bus)
    pair.publisher.publish(1_000_003, b"heard")
    assert (await pair.batches.wait(1_000_003))[-2:] == [1_000_000, 1_000_003]
    missed = await pair.subscription.replay(1_000_001, timeout_s=DEADLINE_S)
    assert missed == [(1_000_001, b"lost"), (1_000_002, b"lost"), (1_000_003, b"heard")]


async def test_a_batch_over_the_payload_limit_is_a_gap_that_no_replay_fills(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        pair.publisher.publish(1_000_001, bytes(PAYLOAD_LIMIT_BYTES))
    assert f"over the limit of {PAYLOAD_LIMIT_BYTES}" in caplog.text
    pair.publisher.publish(1_000_002, b"next")
    await pair.batches.wait(1_000_002)
    assert await pair.subscription.replay(1_000_001, timeout_s=DEADLINE_S) == [(1_000_002, b"next")]


async def test_a_batch_over_the_limit_that_came_while_nats_was_away_ends_the_replay(pair: Pair) -> None:
    pair.broker.disconnect(pair.source_bus)
    pair.publisher.publish(1_000_001, bytes(PAYLOAD_LIMIT_BYTES))
    pair.broker.reconnect(pair.source_bus)
    assert await pair.subscription.replay(1_000_001, timeout_s=DEADLINE_S) == []


async def test_what_has_no_sequence_is_counted_and_the_next_batch_is_heard(pair: Pair) -> None:
    await pair.router_bus.publish(pair.publisher.source.publish.removeprefix("nats:"), b"short")
    pair.publisher.publish(1_000_001, b"next")
    await pair.batches.wait(1_000_001)
    assert pair.subscription.malformed == 1


async def test_a_question_that_is_none_is_counted_at_the_source(pair: Pair) -> None:
    await pair.router_bus.publish(pair.publisher.source.replay.removeprefix("nats:"), b"\xc1")
    await pair.subscription.replay(0, timeout_s=DEADLINE_S)
    assert pair.source_bus.malformed == 1


async def test_a_source_that_is_gone_is_known_at_once(pair: Pair) -> None:
    pair.publisher.close()
    pair.publisher.publish(1_000_001, b"too late")
    assert pair.publisher.replies is not None
    await asyncio.wait((pair.publisher.replies.task,), timeout=DEADLINE_S)
    with pytest.raises(NoResponders):
        await pair.subscription.replay(0, timeout_s=10 * DEADLINE_S)
    assert pair.batches.sequences[-1] == 1_000_000


async def test_an_endless_row_of_empty_pages_is_refused(pair: Pair) -> None:
    async def answer(message: Message) -> None:
        await pair.source_bus.publish(message.reply, REPLAY_PAGE.encode(ReplayPage([], last=False)))

    await pair.source_bus.subscribe("broken", answer)
    subscription = pair.follow(EventSource("nats:headrace.test.events.b", "nats:broken"), lambda *_: None)
    with pytest.raises(ProtocolError, match="empty page"):
        await subscription.replay(0, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("nonsense", ["nats:", "nats:a b", "nats:headrace.*.events.x", "nats:>"])
async def test_a_subject_that_is_none_is_a_protocol_error(pair: Pair, nonsense: str) -> None:
    with pytest.raises(ProtocolError):
        pair.follow(EventSource(nonsense, ""), lambda *_: None)
    subscription = pair.follow(EventSource("nats:headrace.test.events.b", nonsense), lambda *_: None)
    with pytest.raises(ProtocolError):
        await subscription.replay(0, timeout_s=DEADLINE_S)


async def test_without_a_replay_there_is_nothing_to_wait_for(pair: Pair) -> None:
    source = pair.publisher.source
    with pytest.raises(RequestTimeout):
        await pair.follow(EventSource(source.publish, ""), lambda *_: None).replay(0, timeout_s=10 * DEADLINE_S)
    with pytest.raises(Unavailable, match="no stream lost"):
        await pair.follow(EventSource(source.publish, "jetstream:lost"), lambda *_: None).replay(0, timeout_s=1.0)
    pair.subscription.close()
    with pytest.raises(RequestTimeout):
        await pair.subscription.replay(0, timeout_s=10 * DEADLINE_S)


async def test_sources_of_one_process_have_subjects_of_their_own() -> None:
    events = NatsEventBus(MemoryBus(MemoryBroker()), "test", "w1", read_stream=no_stream)
    first, second = events.open_publisher(), events.open_publisher()
    assert first.source == EventSource("nats:headrace.test.events.w1-0", "nats:headrace.test.events.w1-0.replay")
    assert second.source.publish == "nats:headrace.test.events.w1-1"
    await events.close()


async def test_with_a_stream_a_source_keeps_nothing_and_answers_nothing() -> None:
    bus = MemoryBus(MemoryBroker())
    events = NatsEventBus(bus, "test", "w1", stream="kept", read_stream=no_stream)
    publisher = events.open_publisher()
    assert publisher.source.replay == "jetstream:kept"
    assert publisher.replies is None
    assert bus.broker.subscriptions(bus) == []
    publisher.publish(0, b"")
    publisher.close()
    await events.close()
