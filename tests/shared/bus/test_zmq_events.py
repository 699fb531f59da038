"""The frames of KV events, and what a stranger at the other end may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import zmq
import zmq.asyncio

from shared.bus import zmtp
from shared.bus.zmq_events import BATCH_LIMIT_BYTES, END, ZmqEventBus, ZmqEventSubscription
from shared.errors import ConfigError, ProtocolError
from shared.messages.cards import EventSource
from tests.servers import free_port
from tests.shared.bus.test_events import Batches, joined

DEADLINE_S = 60.0


@pytest.fixture
def events() -> Iterator[ZmqEventBus]:
    with ZmqEventBus() as opened:
        yield opened


class Stranger:
    """Sockets of a program that is not ours."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._opened: list[zmq.asyncio.Socket] = []

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        opened = self._context.socket(kind)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for socket in self._opened:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    opened = Stranger()
    yield opened
    opened.close()


async def test_a_batch_is_three_frames(events: ZmqEventBus, stranger: Stranger) -> None:
    publisher = events.open_publisher(topic="kv-events@tiny")
    subscriber = stranger.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(publisher.source.publish)
    sequence = 0
    async with asyncio.timeout(DEADLINE_S):
        while not await subscriber.poll(1):
            publisher.publish(sequence, b"payload")
            sequence += 1
        topic, number, payload = await subscriber.recv_multipart()
    assert (topic, payload) == (b"kv-events@tiny", b"payload")
    assert 0 <= int.from_bytes(number, "big") < sequence
    assert len(number) == 8
    publisher.close()


async def test_a_replay_is_one_answer_a_batch_and_an_end(events: ZmqEventBus, stranger: Stranger) -> None:
    publisher = events.open_publisher(topic="t")
    for sequence in range(3):
        publisher.publish(sequence, str(sequence).encode())
    asker = stranger.socket(zmq.DEALER)
    asker.connect(publisher.source.replay)
    await asker.send_multipart([b"", (1).to_bytes(8, "big")])
    answers = [await asyncio.wait_for(asker.recv_multipart(), DEADLINE_S) for _ in range(3)]
    assert answers == [
        [b"", b"t", (1).to_bytes(8, "big"), b"1"],
        [b"", b"t", (2).to_bytes(8, "big"), b"2"],
        [b"", b"", END, b""],
    ]
    publisher.close()


async def test_a_long_replay_leaves_the_loop_to_others(events: ZmqEventBus) -> None:
    publisher = events.open_publisher()
    for sequence in range(2000):
        publisher.publish(sequence, b"payload")
    subscription = events.subscribe(publisher.source, lambda _sequence, _payload: None)
    replaying = asyncio.create_task(subscription.replay(0, timeout_s=DEADLINE_S))
    left: set[int] = set()
    while not replaying.done():
        await asyncio.sleep(0)
        left |= {len(answer.batches) for answer in publisher._answers}
    assert [sequence for sequence, _ in await replaying] == list(range(2000))
    assert len(left) >= 16
    subscription.close()
    publisher.close()


async def test_a_replay_without_topics_is_read_as_sglang_sends_it(events: ZmqEventBus, stranger: Stranger) -> None:
    router = stranger.socket(zmq.ROUTER)
    port = free_port()
    await bind(router, f"tcp://127.0.0.1:{port}")
    source = EventSource(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{port}")
    subscription = events.subscribe(source, lambda sequence, payload: None)
    asked = asyncio.create_task(subscription.replay(4, timeout_s=DEADLINE_S))
    asker, delimiter, first = await asyncio.wait_for(router.recv_multipart(), DEADLINE_S)
    assert (delimiter, first) == (b"", (4).to_bytes(8, "big"))
    for number in (4, 5):
        await router.send_multipart([asker, b"", number.to_bytes(8, "big"), b"payload"])
    await router.send_multipart([asker, b"", END, b""])
    assert await asked == [(4, b"payload"), (5, b"payload")]
    subscription.close()


async def test_malformed_questions_are_ignored_counted_and_logged_once(
    events: ZmqEventBus, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = events.open_publisher()
    asker = stranger.socket(zmq.DEALER)
    asker.connect(publisher.source.replay)
    for frames in ([b""], [b"", b"short"], [b"no delimiter", bytes(8)], [b"", bytes(8), b"more"], [b"", bytes(8)]):
        await asker.send_multipart(frames)
    assert await asyncio.wait_for(asker.recv_multipart(), DEADLINE_S) == [b"", b"", END, b""]
    publisher.close()
    assert events.malformed == 4
    assert caplog.text.count("malformed request for a replay") == 1


async def test_a_question_of_more_than_a_kilobyte_ends_its_connection_before_it_is_read(
    events: ZmqEventBus, stranger: Stranger
) -> None:
    publisher = events.open_publisher()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(publisher.source.replay.rpartition(":")[2]))
    hello = zmtp.GREETING + zmtp.command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER")
    writer.write(hello + b"\x02" + (1 << 30).to_bytes(8, "big"))
    with suppress(ConnectionError):  # as what it has not read may end the connection
        await asyncio.wait_for(reader.read(), DEADLINE_S)
    writer.transport.abort()
    asker = stranger.socket(zmq.DEALER)
    asker.connect(publisher.source.replay)
    await asker.send_multipart([b"", bytes(8)])
    assert await asyncio.wait_for(asker.recv_multipart(), DEADLINE_S) == [b"", b"", END, b""]
    publisher.close()


async def test_a_batch_over_the_limit_is_not_sent_and_shows_as_a_gap(
    events: ZmqEventBus, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, batches = events.open_publisher(), Batches()
    subscription = events.subscribe(publisher.source, batches.receive)
    await joined(publisher, batches)
    for sequence, size_bytes in ((1_000_000, 1), (1_000_001, BATCH_LIMIT_BYTES + 1), (1_000_002, 1)):
        publisher.publish(sequence, bytes(size_bytes))
    await batches.wait(1_000_002)
    assert batches.sequences[-2:] == [1_000_000, 1_000_002]
    replayed = await subscription.replay(1_000_000, timeout_s=DEADLINE_S)
    assert [sequence for sequence, _ in replayed] == [1_000_000, 1_000_002]
    assert f"the limit is {BATCH_LIMIT_BYTES}" in caplog.text
    subscription.close()
    publisher.close()


async def test_a_batch_over_the_limit_that_others_send_is_never_taken(events: ZmqEventBus, stranger: Stranger) -> None:
    subscription, batches, publisher = await bound(events, stranger)
    await publisher.send_multipart([b"", (7).to_bytes(8, "big"), bytes(BATCH_LIMIT_BYTES + 1)])
    async with asyncio.timeout(DEADLINE_S):
        while 8 not in batches.sequences:  # the connection ends, and the publisher makes another
            await publisher.send_multipart([b"", (8).to_bytes(8, "big"), b"small"])
            await asyncio.sleep(0.001)
    assert 7 not in batches.sequences
    subscription.close()


async def bound(events: ZmqEventBus, stranger: Stranger) -> tuple[ZmqEventSubscription, Batches, zmq.asyncio.Socket]:
    """A subscription that binds, as vLLM's `tcp://host:port` publishers want it, and a publisher that connected."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    batches = Batches()
    subscription = events.subscribe(EventSource(endpoint, "", binds="subscriber"), batches.receive)
    publisher = stranger.socket(zmq.PUB)
    publisher.connect(endpoint)
    async with asyncio.timeout(DEADLINE_S):
        while not batches.all:
            await publisher.send_multipart([b"", bytes(8), b"joining"])
            await asyncio.sleep(0.001)
    return subscription, batches, publisher


async def test_the_subscriber_may_be_the_side_that_binds(events: ZmqEventBus, stranger: Stranger) -> None:
    subscription, batches, publisher = await bound(events, stranger)
    await publisher.send_multipart([b"", (7).to_bytes(8, "big"), b"payload"])
    await batches.wait(7)
    assert batches.all[-1] == (7, b"payload")
    subscription.close()


async def test_malformed_batches_are_counted_logged_once_and_left_out(
    events: ZmqEventBus, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    subscription, batches, publisher = await bound(events, stranger)
    for frames in ([b"alone"], [b"", b"short", b"payload"], [b"", bytes(8), b"payload", b"more"], [b"", bytes(9), b""]):
        await publisher.send_multipart(frames)
    await publisher.send_multipart([b"", (7).to_bytes(8, "big"), b"payload"])
    await batches.wait(7)
    assert set(batches.sequences) == {0, 7}
    assert subscription.malformed == 4
    assert caplog.text.count("malformed KV event") == 1
    subscription.close()


async def test_a_batch_that_ends_after_its_sequence_is_counted_also_if_nothing_follows(
    events: ZmqEventBus, stranger: Stranger
) -> None:
    subscription, batches, publisher = await bound(events, stranger)
    await publisher.send_multipart([b"", (7).to_bytes(8, "big")])
    async with asyncio.timeout(60):
        while not subscription.malformed:  # noqa: ASYNC110 - nothing is called for it
            await asyncio.sleep(0.01)
    await publisher.send_multipart([b"", (8).to_bytes(8, "big"), b"payload"])
    await batches.wait(8)
    assert (set(batches.sequences), subscription.malformed) == ({0, 8}, 1)
    subscription.close()


async def test_a_receiver_that_raises_does_not_stop_the_stream(events: ZmqEventBus, stranger: Stranger) -> None:
    raised: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: raised.append(str(told.get("exception"))))
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    batches = Batches()

    def receive(sequence: int, payload: bytes) -> None:
        batches.receive(sequence, payload)
        if payload == b"bad":
            raise ValueError("a bad batch")

    subscription = events.subscribe(EventSource(endpoint, "", binds="subscriber"), receive)
    publisher = stranger.socket(zmq.PUB)
    publisher.connect(endpoint)
    async with asyncio.timeout(DEADLINE_S):
        while not batches.all:
            await publisher.send_multipart([b"", bytes(8), b"joining"])
            await asyncio.sleep(0.001)
    for sequence, payload in ((1, b"bad"), (2, b"bad"), (3, b"good")):
        await publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
    await batches.wait(3)
    assert raised == ["a bad batch", "a bad batch"]
    subscription.close()


async def bind(publisher: zmq.asyncio.Socket, endpoint: str) -> None:
    """Again and again, while the one before still lets go of the port: ZMQ closes in a thread of its own."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                publisher.bind(endpoint)
            except zmq.ZMQError as wrong:
                if wrong.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)
            else:
                return


async def test_a_subscription_finds_a_source_that_comes_back_at_its_address(
    events: ZmqEventBus, stranger: Stranger
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    batches = Batches()
    subscription = events.subscribe(EventSource(endpoint, ""), batches.receive)
    for sequence in (1, 2):
        publisher = stranger.socket(zmq.PUB)
        await bind(publisher, endpoint)
        async with asyncio.timeout(DEADLINE_S):
            while sequence not in batches.sequences:
                await publisher.send_multipart([b"", sequence.to_bytes(8, "big"), b""])
                await asyncio.sleep(0.001)
        publisher.close(linger=0)
    subscription.close()


async def test_a_publisher_advertises_another_host_than_it_binds() -> None:
    with ZmqEventBus("0.0.0.0", "worker-1.example") as events:
        publisher = events.open_publisher()
        assert publisher.source.publish.startswith("tcp://worker-1.example:")
        assert publisher.source.replay.startswith("tcp://worker-1.example:")
        publisher.close()


async def test_an_address_that_is_not_this_machines_is_a_config_error() -> None:
    with ZmqEventBus("192.0.2.1") as events, pytest.raises(ConfigError):
        events.open_publisher()


@pytest.mark.parametrize("nonsense", ["nonsense", "ipc:///no/such/" + "x" * 120, "ipc:///tmp/\0/" + "x" * 120])
async def test_an_endpoint_that_is_none_is_a_protocol_error(events: ZmqEventBus, nonsense: str) -> None:
    with pytest.raises(ProtocolError):
        events.subscribe(EventSource(nonsense, ""), Batches().receive)
    subscription = events.subscribe(EventSource("tcp://127.0.0.1:9", nonsense), Batches().receive)
    with pytest.raises(ProtocolError):
        await subscription.replay(0, timeout_s=1.0)
    subscription.close()
