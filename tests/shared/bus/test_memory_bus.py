"""The bus inside one process beyond the contract: a Delivery decides when messages arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus
from shared.errors import NoResponders, RequestTimeout

SOON_S = 0.05


class Held:
    """Keeps every message until it is let go."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, str, str, Callable[[], None]]] = []

    def __call__(self, sender: str, receiver: str, subject: str, deliver: Callable[[], None]) -> None:
        self.waiting.append((sender, receiver, subject, deliver))

    def let_go(self, times: int = 1) -> None:
        waiting, self.waiting = self.waiting, []
        for _, _, _, deliver in waiting:
            for _ in range(times):
                deliver()


async def test_a_message_arrives_when_and_as_often_as_its_delivery_says() -> None:
    held, seen = Held(), asyncio.Queue[bytes]()
    broker = MemoryBroker(held)
    sender, receiver = MemoryBus(broker, "a"), MemoryBus(broker, "b")

    async def receive(message: Message) -> None:
        seen.put_nowait(message.payload)

    await receiver.subscribe("x", receive)
    await sender.publish("x", b"1")
    assert [each[:3] for each in held.waiting] == [("a", "b", "x")]
    held.let_go(times=2)
    assert [await seen.get(), await seen.get()] == [b"1", b"1"]
    await receiver.drain()


async def test_a_message_that_arrives_on_a_lost_connection_is_lost() -> None:
    held, seen = Held(), asyncio.Queue[bytes]()
    broker = MemoryBroker(held)
    bus = MemoryBus(broker)

    async def receive(message: Message) -> None:
        seen.put_nowait(message.payload)

    await bus.subscribe("x", receive)
    await bus.publish("x", b"1")
    broker.disconnect(bus)
    held.let_go()
    broker.reconnect(bus)
    await bus.publish("x", b"2")
    held.let_go()
    assert await seen.get() == b"2"
    await bus.drain()


async def test_a_request_and_the_lack_of_responders_travel_too() -> None:
    held = Held()
    bus = MemoryBus(MemoryBroker(held), "a")
    asking = asyncio.create_task(bus.request("x", b"", timeout_s=10.0))
    await asyncio.sleep(0)
    assert [each[:2] for each in held.waiting] == [("a", "a")]
    held.let_go()
    with pytest.raises(NoResponders):
        await asking
    await bus.drain()


async def test_event_batches_and_replays_travel_too() -> None:
    held, seen = Held(), asyncio.Queue[tuple[int, bytes]]()
    broker = MemoryBroker(held)
    publisher = MemoryEventBus(broker.events, "w").open_publisher()
    subscription = MemoryEventBus(broker.events, "r").subscribe(publisher.source, lambda *batch: seen.put_nowait(batch))
    publisher.publish(0, b"0")
    assert [each[:3] for each in held.waiting] == [("w", "r", "events")]
    held.let_go()
    assert await seen.get() == (0, b"0")

    replaying = asyncio.create_task(subscription.replay(0, timeout_s=10.0))
    for travels in (("r", "w", "replay"), ("w", "r", "replay")):
        while not held.waiting:  # noqa: ASYNC110 - the twin answers within a few turns
            await asyncio.sleep(0)
        assert [each[:3] for each in held.waiting] == [travels]
        held.let_go()
    assert await replaying == [(0, b"0")]
    with pytest.raises(RequestTimeout):
        await subscription.replay(0, timeout_s=SOON_S)


async def test_n_subjects_are_remembered_and_messages_to_all_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.bus.memory_bus.SUBJECTS_LIMIT", 3)
    broker, seen = MemoryBroker(), asyncio.Queue[str]()
    bus = MemoryBus(broker)

    async def receive(message: Message) -> None:
        seen.put_nowait(message.subject)

    await bus.subscribe("x.*", receive)
    sent = [f"x.{number % 5}" for number in range(20)]
    for subject in sent:
        await bus.publish(subject, b"")
        assert broker.remembered <= 3
    assert [await seen.get() for _ in sent] == sent
    await bus.drain()
