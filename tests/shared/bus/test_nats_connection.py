"""What servers of NATS can do to connections: be killed, frozen, asked to stop, overrun, or never have been there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.bus.contract import Message
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig
from shared.errors import BusDown
from tests.clusters import nats_cluster, url_of
from tests.logged import logged
from tests.servers import NatsServer, free_port, nats_server

DEADLINE_S = 120.0


class Listener:
    """A bus, and what it hears on the subject `news`."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self, message: Message) -> None:
        self.heard.put_nowait(message.payload)

    async def hears(self, speaker: NatsBus, payload: bytes) -> None:
        """Until what `speaker` publishes, again and again, comes here: servers need a moment to learn who listens, and
        the speaker may be on its way to another server itself."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await speaker.wait_connected()
                try:
                    await speaker.confirm(speaker.connections)
                    await speaker.publish("news", payload)
                except BusDown:
                    await asyncio.sleep(0.05)
                    continue
                try:
                    async with asyncio.timeout(0.2):
                        while await self.heard.get() != payload:
                            pass
                        return
                except TimeoutError:
                    continue

    @property
    def port(self) -> int:
        """The port of its server."""
        client = self.bus._client
        assert client is not None
        assert client.connected_url is not None
        assert client.connected_url.port is not None
        return client.connected_url.port


@asynccontextmanager
async def listening(config: NatsConfig) -> AsyncIterator[Listener]:
    async with asyncio.timeout(DEADLINE_S):
        bus = await connect(config, "test")
    try:
        listener = Listener(bus)
        await bus.subscribe("news", listener.receive)
        yield listener
    finally:
        await bus.drain()


async def moved(listener: Listener, before: int) -> None:
    """Until there is another connection than the first `before`."""
    async with asyncio.timeout(DEADLINE_S):
        while listener.bus.connections == before or not listener.bus.connected:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)


async def test_whatever_ends_a_server_of_three_its_connections_go_to_another_and_hear_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shared.bus.nats_bus")
    with nats_cluster(tmp_path) as servers:
        by_port = {server.port: server for server in servers}
        config = NatsConfig(url=url_of(servers))
        async with listening(config) as one, listening(config) as other:
            for end in (NatsServer.retire, NatsServer.kill, NatsServer.freeze):
                left, before = by_port[one.port], one.bus.connections
                with logged(
                    "left NATS" if end is NatsServer.retire else "lost the connection", "shared.bus.nats_bus"
                ) as said:
                    end(left)
                    await moved(one, before)
                    assert said.is_set()
                assert one.port != left.port
                await one.hears(other.bus, end.__name__.encode())
                await other.hears(one.bus, end.__name__.encode())
                if end is NatsServer.freeze:
                    left.thaw()
                else:
                    await asyncio.to_thread(left.restart)


async def test_a_server_alone_that_will_stop_is_used_to_its_end(own_nats: NatsServer) -> None:
    async with listening(NatsConfig(url=own_nats.url)) as one:
        with logged("lost the connection", "shared.bus.nats_bus") as lost:
            own_nats.retire()
            await one.hears(one.bus, b"still there")
            assert not lost.is_set()
            own_nats.kill()
            await asyncio.wait_for(lost.wait(), DEADLINE_S)
        await asyncio.to_thread(own_nats.start)
        await one.hears(one.bus, b"again")


async def test_of_three_urls_those_that_are_wrong_are_named_and_the_third_serves(own_nats: NatsServer) -> None:
    wrong = (f"nats://127.0.0.1:{free_port()}", "nats://no-such-host.invalid:4222")
    named = [f"no connection to NATS at {url}, the next server is tried" for url in wrong]
    with (
        logged(named[0], "shared.rate_limited_log") as first,
        logged(named[1], "shared.rate_limited_log") as second,
    ):
        async with listening(NatsConfig(url=",".join((*wrong, own_nats.url)))) as one:
            await one.hears(one.bus, b"served")
            await asyncio.to_thread(own_nats.restart)  # now those are tried that were not tried before
            await one.hears(one.bus, b"served again")
            assert first.is_set()
            assert second.is_set()


async def test_a_connection_that_does_not_read_is_closed_by_its_server_and_made_again(tmp_path: Path) -> None:
    def flood(port: int) -> None:
        """Publish until the server has closed the listener, which does not read: the caller holds its event loop."""
        with socket.create_connection(("127.0.0.1", port)) as publisher:
            publisher.sendall(b'CONNECT {"verbose": false}\r\n')
            payload = b"PUB news %d\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
            for _ in range(64):
                publisher.sendall(payload)
            publisher.sendall(b"PING\r\n")
            while b"PONG" not in publisher.recv(1 << 16):
                pass

    with nats_server(tmp_path, 'max_pending: 9MB\nwrite_deadline: "1s"\n') as server:
        async with listening(NatsConfig(url=server.url)) as slow:
            await slow.hears(slow.bus, b"before")
            before = slow.bus.connections
            flood(server.port)
            await moved(slow, before)
            await slow.hears(slow.bus, b"after")
