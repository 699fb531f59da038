from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.frontend.metrics import Metrics
from services.frontend.server import inbox_probe
from services.frontend.server.inbox_probe import ClientInboxes, NoListener
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.errors import BusDown
from shared.messages.codec import JSON_HEADER
from tests.frontend.peers import DEADLINE_S

INBOX = "_INBOX.client"


class Client:
    """Listens at an inbox and keeps the messages."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)
        self.heard: list[Message] = []
        self._came = asyncio.Event()

    async def listen(self) -> None:
        await self.bus.subscribe(INBOX, self._take)

    async def _take(self, message: Message) -> None:
        self.heard.append(message)
        self._came.set()

    async def hears(self, count: int) -> list[bytes]:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.heard) < count:
                self._came.clear()
                await self._came.wait()
        return [message.payload for message in self.heard[:count]]


class Asking:
    """Make inboxes that are probed, and their metrics."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)
        self._registry = CollectorRegistry()
        self.inboxes = ClientInboxes(self.bus, Metrics(self._registry))

    @property
    def noticed(self) -> float:
        return self._registry.get_sample_value("headrace_unnoticed_disconnect_seconds_count") or 0.0

    @property
    def unnoticed_s(self) -> float:
        return self._registry.get_sample_value("headrace_unnoticed_disconnect_seconds_sum") or 0.0


@asynccontextmanager
async def asking(broker: MemoryBroker) -> AsyncIterator[Asking]:
    one = Asking(broker)
    running = asyncio.create_task(one.inboxes.run())
    try:
        yield one
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def wait_for_ever(one: Asking, nothing: bytes) -> None:
    async with one.inboxes.watch(INBOX) as inbox, asyncio.timeout(DEADLINE_S):
        inbox.keepalive = nothing
        await asyncio.Event().wait()


async def talk(one: Asking) -> None:
    async with one.inboxes.watch(INBOX) as inbox, asyncio.timeout(DEADLINE_S):
        inbox.keepalive = b"nothing"
        while True:
            await inbox.send(b"text")
            await asyncio.sleep(0)


async def test_a_client_that_leaves_while_it_waits_is_noticed_before_its_answer() -> None:
    broker = MemoryBroker()
    client = Client(broker)
    await client.listen()
    async with asking(broker) as one:
        waiting = asyncio.create_task(wait_for_ever(one, b"nothing"))
        assert await client.hears(2) == [b"nothing", b"nothing"]
        client.bus.disconnect()
        with pytest.raises(NoListener):
            await waiting
        assert one.noticed == 1
        assert 0 < one.unnoticed_s < DEADLINE_S
        assert not one.inboxes._watched


async def test_messages_of_an_answer_are_the_probes_and_nothing_else_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_probe, "PROBE_S", 1.0)
    broker = MemoryBroker()
    client = Client(broker)
    await client.listen()
    async with asking(broker) as one:
        talking = asyncio.create_task(talk(one))
        await client.hears(100)
        client.bus.disconnect()
        with pytest.raises(NoListener):
            await talking
        assert {message.payload for message in client.heard} == {b"text"}
        assert sum(bool(message.reply) for message in client.heard) == 1, "the first one asked, the next were too soon"
        assert client.heard[0].headers == JSON_HEADER


async def test_an_inbox_without_a_keepalive_is_not_probed() -> None:
    broker = MemoryBroker()
    client = Client(broker)
    await client.listen()
    async with asking(broker) as one:
        async with one.inboxes.watch("_INBOX.gone") as silent, one.inboxes.watch(INBOX) as other:
            other.keepalive = b"nothing"
            await client.hears(3)
            assert silent.keepalive is None
        assert one.noticed == 0


async def test_a_late_no_responders_answer_ends_no_request() -> None:
    broker = MemoryBroker()
    one = Asking(broker)
    async with one.inboxes.watch(INBOX) as inbox:
        await inbox.send(b"last")  # asks; "no responders" comes when this block has been left
    await asyncio.sleep(0)
    assert one.noticed == 0


async def test_while_nats_is_unavailable_no_inbox_is_probed_and_no_client_counts_as_gone() -> None:
    broker = MemoryBroker()
    client = Client(broker)
    await client.listen()
    async with asking(broker) as one, one.inboxes.watch(INBOX) as inbox:
        inbox.keepalive = b"nothing"
        await client.hears(1)
        broker.disconnect(one.bus)
        with pytest.raises(BusDown):
            await inbox.probe()
        await inbox.probe()
        broker.reconnect(one.bus)
        await client.hears(2)


async def test_an_answer_interrupted_by_an_outage_of_nats_does_not_go_on_and_one_not_begun_does() -> None:
    broker = MemoryBroker()
    one = Asking(broker)
    async with one.inboxes.watch(INBOX) as begun, one.inboxes.watch(INBOX) as waiting:
        begun.keepalive = b"nothing"
        await begun.send(b"text")
        broker.disconnect(one.bus)
        broker.reconnect(one.bus)
        with pytest.raises(BusDown, match="in the middle"):
            await begun.send(b"more")
        await begun.probe()
        await waiting.send(b"text")
        await waiting.send(b"more", {LAST_HEADER: "true"})


async def test_a_last_message_that_nats_may_not_have_raises_an_error() -> None:
    broker = MemoryBroker()
    one = Asking(broker)
    publish = one.bus.publish

    async def publish_and_lose(*args: Any, **fields: Any) -> None:
        await publish(*args, **fields)
        broker.disconnect(one.bus)

    one.bus.publish = publish_and_lose  # type: ignore[method-assign]
    async with one.inboxes.watch(INBOX) as inbox:
        with pytest.raises(BusDown):
            await inbox.send(b"whole", {LAST_HEADER: "true"})


async def test_nothing_comes_after_the_last_message_however_long_nats_takes_to_confirm_it() -> None:
    broker = MemoryBroker()
    client = Client(broker)
    await client.listen()
    one = Asking(broker)
    confirm = one.bus.confirm

    async def confirm_late(connections: int) -> None:
        for _ in range(3):
            await inbox.probe()
        await confirm(connections)

    one.bus.confirm = confirm_late  # type: ignore[method-assign]
    async with one.inboxes.watch(INBOX) as inbox:
        inbox.keepalive = b"nothing"
        await inbox.send(b"whole", {LAST_HEADER: "true"})
    await one.bus.publish(INBOX, b"of another answer")
    assert await client.hears(2) == [b"whole", b"of another answer"]


async def test_a_client_found_gone_again_while_its_block_unwinds_is_gone_once() -> None:
    """An exception from the `gone` callback would end the connection to NATS."""
    broker = MemoryBroker()
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: wrong.append(told))
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly(one: Asking) -> None:
        async with one.inboxes.watch(INBOX) as inbox:
            inbox.keepalive = b"{}"
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await may_end.wait()

    one = Asking(broker)
    serving = asyncio.create_task(end_slowly(one))
    await asyncio.sleep(0)
    [inbox] = one.inboxes._watched
    await inbox.probe()
    async with asyncio.timeout(DEADLINE_S):
        await ending.wait()
        await inbox.probe()
        await one.bus.confirm(one.bus.connections)
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(NoListener):
            await serving
    assert not wrong


async def test_a_time_out_of_the_block_itself_is_not_taken_for_a_client_that_went() -> None:
    one = Asking(MemoryBroker())
    with pytest.raises(TimeoutError):
        async with one.inboxes.watch(INBOX):
            raise TimeoutError
    assert one.noticed == 0
