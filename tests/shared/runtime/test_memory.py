"""shared/runtime/memory.py: the services of one process reach each other, and each leaves alone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from shared.bus.contract import Message
from shared.config import NatsConfig, ServiceConfig
from shared.errors import BusDown, NoResponders, PayloadTooLarge
from shared.runtime.memory import MemoryNetwork
from shared.runtime.network import Network
from shared.runtime.observe import ProcessHealth
from tests.shared.watched import watching

CONFIG = ServiceConfig(nats=NatsConfig(payload_limit_bytes=1000))
LIMIT_S = 60.0


async def connected(network: MemoryNetwork, opened: AsyncExitStack, name: str) -> Network:
    wanted = {"client_bus": True, "publishes": True}
    return await network.connect(opened, CONFIG, name, CollectorRegistry(), ProcessHealth(), **wanted)


async def test_two_services_hear_each_other_and_see_each_others_keys() -> None:
    network = MemoryNetwork()
    async with AsyncExitStack() as opened:
        first, second = await connected(network, opened, "first"), await connected(network, opened, "second")

        async def answer(message: Message) -> None:
            await first.bus.publish(message.reply, message.payload)

        await first.bus.subscribe("asked", answer)
        assert (await second.bus.request("asked", b"1", timeout_s=LIMIT_S)).payload == b"1"
        registration = await first.discovery.register(lambda _epoch: {"/here/a": b"1"})
        async with watching(second.discovery, "/here/") as watched:
            await watched.until_entries({"/here/a": b"1"})
            await registration.close()
            await watched.until_entries({})
        batches = asyncio.Queue[tuple[int, bytes]](1)
        publisher = first.events.open_publisher()
        second.events.subscribe(publisher.source, lambda *batch: batches.put_nowait(batch))
        publisher.publish(0, b"a batch")
        async with asyncio.timeout(LIMIT_S):
            assert await batches.get() == (0, b"a batch")
        assert (first.client_bus, [*first.watches]) == (None, [])


async def test_a_service_that_has_left_is_away_and_the_other_goes_on() -> None:
    network = MemoryNetwork()
    async with AsyncExitStack() as opened:
        stays = await connected(network, opened, "stays")
        async with AsyncExitStack() as ended:
            leaves = await connected(network, ended, "leaves")

            async def answer(message: Message) -> None:
                await leaves.bus.publish(message.reply, b"")

            await leaves.bus.subscribe("asked", answer)
        with pytest.raises(BusDown):
            await leaves.bus.publish("asked", b"")
        with pytest.raises(NoResponders):
            await stays.bus.request("asked", b"", timeout_s=LIMIT_S)


async def test_networks_of_two_processes_in_one_test_do_not_meet() -> None:
    async with AsyncExitStack() as opened:
        here, there = [await connected(MemoryNetwork(), opened, "a") for _ in range(2)]
        await there.discovery.register(lambda _epoch: {"/here/a": b"1"})
        assert await here.discovery.list("/here/") == {}


async def test_the_limit_of_a_payload_is_that_of_the_settings() -> None:
    async with AsyncExitStack() as opened:
        one = await connected(MemoryNetwork(), opened, "a")
        with pytest.raises(PayloadTooLarge):
            await one.bus.publish("x", bytes(1001))
