"""Events and messages are sent together, wait while NATS is away, and are limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus import outbox
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.outbox import Outbox
from shared.messages.generate import CANCEL, Cancel
from shared.messages.select import LOAD_EVENTS, Finished, LoadEvents

MODEL = "m"
CANCEL_W1 = subjects.worker("n", "w1", "cancel")


class Heard:
    """Load events, and Cancels as an example of other messages."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)
        self.load: list[LoadEvents] = []
        self.cancels: list[Cancel] = []

    async def listen(self) -> None:
        self.subscriptions = [
            await self.bus.subscribe(subjects.router_load("n", MODEL), self._on_load),
            await self.bus.subscribe(CANCEL_W1, self._on_cancel),
        ]

    async def _on_load(self, message: Message) -> None:
        self.load.append(LOAD_EVENTS.decode(message.payload))

    async def _on_cancel(self, message: Message) -> None:
        self.cancels.append(CANCEL.decode(message.payload))

    async def all(self) -> None:
        for subscription in self.subscriptions:
            await subscription.unsubscribe()


async def opened() -> tuple[Outbox, Heard, MemoryBus, CollectorRegistry]:
    broker, registry = MemoryBroker(), CollectorRegistry()
    heard = Heard(broker)
    await heard.listen()
    bus = MemoryBus(broker)
    return Outbox(bus, "n", registry, batch_s=0.005), heard, bus, registry


async def test_load_events_go_out_in_order_as_one_message() -> None:
    box, heard, _, _ = await opened()
    events = [Finished("a", 1), Finished("b", 1)]
    for event in events:
        box.publish_load(MODEL, event)
    box.post(CANCEL_W1, CANCEL.encode(Cancel("a", 1)))
    assert await box.flush()
    await heard.all()
    assert heard.load == [LoadEvents(MODEL, list(events))]
    assert heard.cancels == [Cancel("a", 1)]


async def test_while_nats_is_away_load_events_wait() -> None:
    box, heard, bus, _ = await opened()
    bus.disconnect()
    box.publish_load(MODEL, Finished("a", 1))
    assert not await box.flush()
    bus.reconnect()
    assert await box.flush()
    await heard.all()
    assert heard.load == [LoadEvents(MODEL, [Finished("a", 1)])]


async def test_at_the_bound_the_oldest_half_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "EVENTS_LIMIT", 4)
    monkeypatch.setattr(outbox, "EVENTS_A_MESSAGE", 2)
    box, heard, _, registry = await opened()
    for number in range(5):
        box.publish_load(MODEL, Finished(str(number), 1))
    assert await box.flush()
    await heard.all()
    assert [[event.request for event in batch.events] for batch in heard.load] == [["2", "3"], ["4"]]
    assert registry.get_sample_value("headrace_unsent_load_events_total") == 2


async def test_an_address_that_is_no_subject_costs_only_its_own_message() -> None:
    box, heard, _, registry = await opened()
    box.post("no worker's id", CANCEL.encode(Cancel("a", 1)))
    box.post(CANCEL_W1, CANCEL.encode(Cancel("b", 1)))
    box.publish_load("", Finished("a", 1))
    box.publish_load(MODEL, Finished("b", 1))
    assert await box.flush()
    await heard.all()
    assert heard.cancels == [Cancel("b", 1)]
    assert heard.load == [LoadEvents(MODEL, [Finished("b", 1)])]
    assert registry.get_sample_value("headrace_unsendable_messages_total") == 2


class CongestedBus(MemoryBus):
    """Publishing waits until `opened`."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.opened = asyncio.Event()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        no_responders: Callable[[], None] | None = None,
    ) -> None:
        await self.opened.wait()
        await super().publish(subject, payload, headers=headers, no_responders=no_responders)


@pytest.mark.parametrize("lost", [False, True])
async def test_events_that_come_while_two_flushes_wait_are_sent_once(lost: bool) -> None:
    broker = MemoryBroker()
    heard = Heard(broker)
    await heard.listen()
    bus = CongestedBus(broker)
    box = Outbox(bus, "n", CollectorRegistry(), batch_s=0.005)
    box.publish_load(MODEL, Finished("a", 1))
    first = asyncio.create_task(box.flush())
    await asyncio.sleep(0)
    box.publish_load(MODEL, Finished("b", 1))
    second = asyncio.create_task(box.flush())
    await asyncio.sleep(0)
    box.publish_load(MODEL, Finished("c", 1))
    if lost:
        bus.disconnect()
    bus.opened.set()
    assert [await first, await second] == [not lost] * 2
    bus.reconnect()
    assert await box.flush()
    await heard.all()
    told = [event.request for batch in heard.load for event in batch.events]
    assert sorted(told) == ["a", "b", "c"]
