from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from services.kvbm.doors.replies import ReplySender
from services.kvbm.metrics import StoreMetrics
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.messages.codec import JSON_HEADER


class Rig:
    """A reply sender, and the messages that arrive."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, payload_limit_bytes=100)
        self.registry = CollectorRegistry()
        self.answers = ReplySender(self.bus, StoreMetrics(self.registry))
        self.arrived: asyncio.Queue[Message] = asyncio.Queue()

    async def open(self) -> Rig:
        await MemoryBus(self.broker).subscribe("asker", self.arrived.put)
        return self

    async def answer(self, payload: bytes, last: bool) -> bool:
        return await self.answers.send(question(), payload, last=last)

    @property
    def unanswered(self) -> float:
        return self.registry.get_sample_value("headrace_kvbm_unanswered_requests_total") or 0.0


def question(**headers: str) -> Message:
    return Message("headrace.test.kvbm.b1.fetch", b"", "asker", headers)


async def test_queued_replies_keep_their_order_and_the_last_one_is_marked() -> None:
    rig = await Rig().open()
    running = asyncio.create_task(rig.answers.run())
    for number in range(3):
        rig.answers.queue(rig.answer, b"%d" % number, last=number == 2)
    async with asyncio.timeout(60):
        arrived = [await rig.arrived.get() for _ in range(3)]
    assert [message.payload for message in arrived] == [b"0", b"1", b"2"]
    assert [message.headers.get(LAST_HEADER) for message in arrived] == [None, None, "true"]
    running.cancel()


async def test_a_question_in_json_gets_a_reply_marked_as_json() -> None:
    rig = await Rig().open()
    assert await rig.answers.send(question(**JSON_HEADER), b"{}")
    async with asyncio.timeout(60):
        assert (await rig.arrived.get()).headers == JSON_HEADER


async def test_what_cannot_be_sent_is_counted_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    rig = await Rig().open()
    assert not await rig.answers.send(question(), bytes(101))
    assert "101" in caplog.text
    rig.broker.disconnect(rig.bus)
    rig.answers.queue(rig.answer, b"lost", last=True)
    await rig.answers.flush()
    rig.broker.reconnect(rig.bus)
    await rig.answers.flush()
    assert rig.arrived.empty()
    assert rig.unanswered == 2
