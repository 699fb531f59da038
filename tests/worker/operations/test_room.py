"""services/worker/operations/room.py: the process that decides hears of an engine that loads, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from services.worker.config import Device, WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.operations import room
from services.worker.operations.room import ask_for_room
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.discovery.memory import MemoryStore
from shared.messages.turns import MODEL_TURN, WANT_MODEL, ModelTurn, WantModel
from tests.fake_runtime import fake_runtime
from tests.worker.scripted_engine import FACTS, ScriptedEngines
from tests.worker.shell import NAMESPACE, WORKER, running_worker, write_model

ASKED = WantModel(WORKER, "model", 0, 0.0, loads=True)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ASK_EVERY_S", 0.01)


class Decider:
    """The process that decides, in place of which a test counts."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.heard: list[WantModel] = []

    async def start(self) -> None:
        await self._bus.subscribe(subjects.turns(NAMESPACE, "gpu0"), self._receive)

    async def _receive(self, message: Message) -> None:
        self.heard.append(WANT_MODEL.decode(message.payload))
        await self._bus.publish(message.reply, MODEL_TURN.encode(ModelTurn("model", "gone")))

    async def hears(self, number: int) -> None:
        async with asyncio.timeout(60.0):
            while len(self.heard) < number:  # noqa: ASYNC110 - nothing is called for it
                await asyncio.sleep(0.005)


class Asking:
    def __init__(self) -> None:
        self.loads = True
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.loads

    async def looked(self, times: int) -> None:
        until = self.looks + times
        async with asyncio.timeout(60.0):
            while self.looks < until:  # noqa: ASYNC110 - nothing is called for it
                await asyncio.sleep(0.005)


@asynccontextmanager
async def asking(limit_s: float) -> AsyncIterator[tuple[Asking, MemoryBroker]]:
    broker = MemoryBroker()
    async with fake_runtime(NAMESPACE, "worker", WORKER, MemoryBus(broker), broker, MemoryStore()) as runtime:
        one = Asking()
        task = asyncio.ensure_future(ask_for_room(runtime, "gpu0", "model", one.look, limit_s))
        yield one, broker
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_it_asks_while_the_engine_loads_also_if_nothing_answered_at_first() -> None:
    async with asking(60.0) as (one, broker):
        await one.looked(2)
        decider = Decider(MemoryBus(broker))
        await decider.start()
        await decider.hears(3)
        one.loads = False
        await one.looked(2)
        heard = len(decider.heard)
        await one.looked(3)
        assert decider.heard == [ASKED] * heard
        one.loads = True
        await decider.hears(heard + 1)


async def test_it_gives_an_engine_up_that_loads_for_too_long() -> None:
    async with asking(0.0) as (one, broker):
        decider = Decider(MemoryBus(broker))
        await decider.start()
        await one.looked(3)
        assert decider.heard == []


@pytest.mark.parametrize(("device", "asks"), [("cuda", True), ("cpu", False)])
async def test_a_worker_asks_if_its_engine_loads_on_a_gpu(tmp_path: Path, device: Device, asks: bool) -> None:
    model = str(write_model(tmp_path / "model"))
    config = WorkerConfig(namespace=NAMESPACE, model=model, engine="native", turns="gpu0", device=device, drain_s=1.0)
    engines = ScriptedEngines(Loading("waiting for other models to leave the GPU", 0.0))
    async with running_worker(config, start_engine=engines.start) as shell:
        decider = Decider(MemoryBus(shell.broker))
        await decider.start()
        await shell.peer.until(lambda: bool(engines.all))
        if asks:
            await decider.hears(2)
            assert decider.heard[0] == ASKED
            engines.all[-1].report(FACTS)
            await shell.peer.until(lambda: shell.worker.engine.facts is not None)
            assert not shell.worker._engine_loads
        else:
            assert list(shell.worker._room_asks()) == []
