"""shared/bus/curve.py: who knows a publisher's key hears it, and no one else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq
from msgspec.structs import replace

from shared.bus import curve
from shared.bus.zmq_events import ZmqEventBus
from shared.errors import ProtocolError, RequestTimeout
from tests.shared.bus.test_events import Batches, joined

DEADLINE_S = 60.0
SECRET = b"these tokens are secret"


@pytest.fixture
def events() -> Iterator[ZmqEventBus]:
    with ZmqEventBus(encrypted=True) as opened:
        yield opened


class Wire:
    """Passes the bytes of connections on to a port, and keeps them all."""

    def __init__(self) -> None:
        self.seen = bytearray()

    @asynccontextmanager
    async def to(self, endpoint: str) -> AsyncIterator[str]:
        """Yield the endpoint of this wire to another endpoint."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        async with asyncio.TaskGroup() as tasks:

            async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, back = await asyncio.open_connection(host, int(port))
                tasks.create_task(self._pass(reader, back))
                tasks.create_task(self._pass(there, writer))

            server = await asyncio.start_server(accepted, "127.0.0.1", 0)
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.seen += data
            writer.write(data)
        writer.close()


async def test_neither_events_nor_replays_are_readable_on_the_wire(events: ZmqEventBus) -> None:
    publisher, batches, wire = events.open_publisher(topic="tiny"), Batches(), Wire()
    async with wire.to(publisher.source.publish) as publish, wire.to(publisher.source.replay) as asked:
        subscription = events.subscribe(replace(publisher.source, publish=publish, replay=asked), batches.receive)
        await joined(publisher, batches)
        publisher.publish(1_000_000, SECRET)
        await batches.wait(1_000_000)
        assert (1_000_000, SECRET) in await subscription.replay(1_000_000, timeout_s=DEADLINE_S)
        subscription.close()
        publisher.close()
    assert len(wire.seen) > 500
    assert SECRET not in wire.seen
    assert publisher.source.curve_key.encode() not in wire.seen


@pytest.mark.parametrize("key", ["", curve.new_keys().public.decode()])
async def test_without_the_publishers_key_nothing_is_heard(events: ZmqEventBus, key: str) -> None:
    publisher, known, unknown = events.open_publisher(), Batches(), Batches()
    stranger = events.subscribe(replace(publisher.source, curve_key=key), unknown.receive)
    subscription = events.subscribe(publisher.source, known.receive)
    await joined(publisher, known)
    for sequence in range(1_000_000, 1_000_100):
        publisher.publish(sequence, SECRET)
        await asyncio.sleep(0)
    await known.wait(1_000_099)
    with pytest.raises(RequestTimeout):
        await stranger.replay(0, timeout_s=0.3)
    assert unknown.all == []
    for each in (subscription, stranger, publisher):
        each.close()


@pytest.mark.parametrize("key", ["short", "€" * 40, "\\" * 40])
async def test_what_is_no_key_is_an_invalid_source(events: ZmqEventBus, key: str) -> None:
    publisher = events.open_publisher()
    with pytest.raises(ProtocolError, match=r"KV events of tcp://"):
        events.subscribe(replace(publisher.source, curve_key=key), Batches().receive)
    publisher.close()


async def test_a_subscriber_that_does_not_read_holds_a_bounded_number_of_batches(events: ZmqEventBus) -> None:
    published = 3 * curve.SEND_LIMIT_BATCHES
    with zmq.Context() as context:
        publisher = events.open_publisher()
        silent = context.socket(zmq.SUB)
        silent.rcvhwm = 1
        silent.subscribe(b"")
        curve.join(silent, publisher.source.curve_key)
        silent.connect(publisher.source.publish)
        async with asyncio.timeout(DEADLINE_S):
            while not silent.poll(0):
                publisher.publish(0, b"joining")
                await asyncio.sleep(0.001)
        for sequence in range(published):
            publisher.publish(sequence, bytes(1 << 13))
        received = 0
        while silent.poll(1000):
            received += len(silent.recv_multipart()[2]) == 1 << 13
        silent.close(linger=0)
        assert 0 < received < published
        publisher.close()
