"""The port of KV events under unknown peers, which speak ZMTP by hand, since libzmq's own sockets cannot misbehave."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from shared.bus import event_port, zmtp
from shared.bus.event_port import READ_BYTES, SEND_LIMIT_BYTES, EventPort
from tests.resource_limits import no_descriptor_left

DEADLINE_S = 120.0
SUB = zmtp.command(b"READY", b"\x0bSocket-Type\0\0\0\x03SUB")
HELLO = zmtp.GREETING + SUB
WELCOME = zmtp.GREETING + zmtp.READY


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


class Stranger:
    """A connection to the port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            await self._writer.drain()

    async def receive(self, size_bytes: int) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readexactly(size_bytes)

    async def until(self, marker: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._reader.readuntil(marker)

    async def ended(self) -> bytes:
        """What comes until the other side closes."""
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read()


@pytest.fixture
async def port() -> AsyncIterator[EventPort]:
    opened = EventPort("127.0.0.1", b"")
    yield opened
    opened.close()


@asynccontextmanager
async def connected(port: EventPort) -> AsyncIterator[Stranger]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    try:
        yield Stranger(reader, writer)
    finally:
        writer.transport.abort()


async def heard(port: EventPort, stranger: Stranger) -> None:
    """Until the stranger's subscription counts; a batch may be on its way afterwards."""
    batch = zmtp.message([b"", b"sequence", b"payload"])
    hearing = asyncio.create_task(stranger.receive(len(batch)))
    while not hearing.done():
        port.publish(b"", b"sequence", b"payload")
        await asyncio.wait([hearing], timeout=0.01)
    assert await hearing == batch


async def test_subscriptions_to_topics_that_are_not_published_take_no_memory(port: EventPort) -> None:
    async with connected(port) as stranger:
        await stranger.send(HELLO)
        assert await stranger.receive(len(WELCOME)) == WELCOME
        before_mib = resident_mib()
        for number in range(8000):
            await stranger.send(zmtp.message([b"\1" + number.to_bytes(4, "big") + bytes(996)]))
        await stranger.send(zmtp.message([b"\1"]))
        await heard(port, stranger)
        # libzmq's PUB socket takes 480 MiB for them
        assert resident_mib() - before_mib < 150


async def test_a_frame_that_says_it_is_large_ends_the_connection_and_no_other(port: EventPort) -> None:
    async with connected(port) as good, connected(port) as bad:
        await good.send(HELLO + zmtp.message([b"\1"]))
        assert await good.receive(len(WELCOME)) == WELCOME
        await bad.send(HELLO + b"\x02" + (1 << 30).to_bytes(8, "big"))
        assert (await bad.ended()).startswith(zmtp.GREETING)
        await heard(port, good)
        assert port.connections == 1


async def test_a_subscriber_that_reads_nothing_loses_batches_beyond_the_bound_and_others_lose_none(
    port: EventPort,
) -> None:
    payload = bytes(4 << 20)
    batch = zmtp.message([b"", b"sequence", payload])
    rounds = 6 * SEND_LIMIT_BYTES // len(payload)
    async with connected(port) as silent, connected(port) as good:
        for stranger in (silent, good):
            await stranger.send(HELLO + zmtp.message([b"\1"]))
            assert await stranger.receive(len(WELCOME)) == WELCOME
        await heard(port, silent)
        await heard(port, good)
        port.publish(b"", b"sequence", b"marker")
        await good.until(b"marker")
        before_mib = resident_mib()
        for _ in range(rounds):
            port.publish(b"", b"sequence", payload)
            assert len(await good.receive(len(batch))) == len(batch)
        assert resident_mib() - before_mib < 3 * (SEND_LIMIT_BYTES >> 20)


async def test_what_waits_for_many_subscribers_that_read_nothing_is_bounded_for_all_of_them(port: EventPort) -> None:
    payload = bytes(4 << 20)
    async with AsyncExitStack() as silent:
        before_mib = resident_mib()
        for _ in range(6):
            stranger = await silent.enter_async_context(connected(port))
            await stranger.send(HELLO + zmtp.message([b"\1"]))
            assert await stranger.receive(len(WELCOME)) == WELCOME
            await heard(port, stranger)
            for _ in range(SEND_LIMIT_BYTES // len(payload) + 4):
                port.publish(b"", b"sequence", payload)
        assert resident_mib() - before_mib < 3 * (SEND_LIMIT_BYTES >> 20)
        assert port.connections == 6
        assert port.waiting.size_bytes <= SEND_LIMIT_BYTES
    async with asyncio.timeout(DEADLINE_S):
        while port.connections:  # noqa: ASYNC110 - nothing is called for it
            await asyncio.sleep(0.01)
    assert not port.waiting.size_bytes


async def test_a_subscriber_that_reads_late_gets_whole_batches_the_latest_included(port: EventPort) -> None:
    async with connected(port) as slow:
        await slow.send(HELLO + zmtp.message([b"\1"]) + zmtp.command(b"PING", b"\0\1late"))
        assert await slow.receive(len(WELCOME)) == WELCOME
        await slow.until(b"late")
        sent = [zmtp.message([b"", number.to_bytes(8, "big"), bytes(1 << 20)]) for number in range(120)]
        for number in range(len(sent)):
            port.publish(b"", number.to_bytes(8, "big"), bytes(1 << 20))
        numbers: list[int] = []
        while numbers[-1:] != [len(sent) - 1]:
            batch = await slow.receive(len(sent[0]))
            numbers.append(sent.index(batch))
        assert numbers == sorted(set(numbers))
        assert len(numbers) < len(sent)
        assert not port.waiting.size_bytes


async def test_a_stranger_that_leaves_its_handshake_undone_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_port, "HANDSHAKE_LIMIT_S", 0.1)
    port = EventPort("127.0.0.1", b"")
    for beginning in (b"", zmtp.GREETING[:10], zmtp.GREETING):
        async with connected(port) as stranger:
            await stranger.send(beginning)
            assert (await stranger.ended()).startswith(zmtp.GREETING)
    assert not port.connections
    port.close()


async def test_a_machine_without_files_left_loses_no_port(port: EventPort, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as stranger:
        stranger.setblocking(False)
        with no_descriptor_left():
            with suppress(BlockingIOError):
                stranger.connect(("127.0.0.1", port.port))
            async with asyncio.timeout(DEADLINE_S):
                while "Too many open files" not in caplog.text:  # noqa: ASYNC110 - nothing is called for it
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(stranger, 64) == zmtp.GREETING


async def test_a_connection_over_the_bound_is_closed_at_once_and_its_place_is_free_afterwards() -> None:
    port = EventPort("127.0.0.1", b"", subscribers_limit=1)
    async with connected(port) as first:
        assert await first.receive(len(zmtp.GREETING)) == zmtp.GREETING
        async with connected(port) as second:
            assert await second.ended() == b""
    async with asyncio.timeout(DEADLINE_S):
        while port.connections:  # noqa: ASYNC110 - nothing is called for it
            await asyncio.sleep(0.01)
    async with connected(port) as third:
        assert await third.receive(len(zmtp.GREETING)) == zmtp.GREETING
    port.close()


async def test_pings_of_a_subscriber_that_reads_nothing_are_bounded(port: EventPort) -> None:
    async with connected(port) as stranger:
        await stranger.send(HELLO)
        before_mib = resident_mib()
        ping = zmtp.command(b"PING", b"\0\1" + bytes(16))
        for _ in range(200):
            await stranger.send(ping * (READ_BYTES // len(ping)))
        assert resident_mib() - before_mib < 150
