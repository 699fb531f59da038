"""services/worker/requests/frame_sender.py: in order, and never all of a long ring in one turn."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import PARTS
from services.worker.metrics import WorkerMetrics
from services.worker.requests.frame_log import FrameLog
from services.worker.requests.frame_sender import FAIR_SHARE, FrameSender
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.messages.frames import STEP_FRAME

FRAMES = 10 * FAIR_SHARE


async def test_a_long_ring_is_sent_again_in_order_with_turns_for_others_between() -> None:
    broker = MemoryBroker()
    bus, frontend = MemoryBus(broker), MemoryBus(broker)
    heard: list[int] = []

    async def receive(message: Message) -> None:
        heard.append(STEP_FRAME.decode(message.payload).sequence)

    await frontend.subscribe(subjects.stream("test", "f"), receive)
    log = FrameLog("w")
    sender = FrameSender(bus, "test", log, WorkerMetrics(CollectorRegistry()))
    for _ in range(FRAMES):
        log.append("f", PARTS.encode([]))
    await sender.flush()
    log.rewind("f", 0)
    turns = 0
    sending = asyncio.create_task(sender.flush())
    while not sending.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= FRAMES // FAIR_SHARE
    await frontend.drain()
    assert heard == 2 * list(range(FRAMES))
