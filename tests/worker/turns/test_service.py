"""services/worker/turns/service.py: the turns of a device over the bus, with workers that do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from services.worker.turns.config import TurnsConfig
from services.worker.turns.service import Coordinator
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.discovery.contract import Registration
from shared.discovery.memory import MemoryDiscovery, MemoryStore
from shared.errors import ConfigError
from shared.messages.cards import ASLEEP, INSTANCE, Instance, KvLayout, ModelCard, TurnTaker
from shared.messages.codec import JSON_HEADER
from shared.messages.load import LOAD_REPORT, LoadReport
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker, WorkerOperated
from shared.messages.turns import MODEL_TURN, TURNS_STATE, WANT_MODEL, ModelTurn, WantModel
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime
from tests.metric_values import summed

NAMESPACE = "test"
LIMIT_S = 60.0
CONFIG = TurnsConfig(namespace=NAMESPACE, device="gpu0", turn_s=0.0, least_awake_s=0.0, drain_s=7.0, level=1)


@dataclass
class SleepyWorker:
    """A worker that does at once what it is asked for, unless `fails` says why not."""

    device: Device
    model: str
    instance: str
    started: float = 0.0
    state: str = ASLEEP
    fails: WorkerOperated | None = None
    orders: list[OperateWorker] = field(default_factory=list)
    registration: Registration | None = None

    async def start(self) -> None:
        bus = MemoryBus(self.device.broker)
        await bus.subscribe(subjects.worker(NAMESPACE, self.instance, "operate"), self._operate)
        await self.publish()

    async def publish(self) -> None:
        if self.registration is None:
            self.registration = await MemoryDiscovery(self.device.store).register(self._entries)
        else:
            await self.registration.publish()

    def _entries(self, epoch: int) -> dict[str, bytes]:
        card = ModelCard(
            *(self.model, self.instance, "", "", "", 64, 64, 16, 4), kv_layout=KvLayout("float32", 1, 1, 8, 16)
        )
        entry = Instance(
            *(NAMESPACE, "worker", self.instance, epoch, "here", 1, self.started, "0"),
            state=self.state,
            turns=TurnTaker("gpu0", card),
        )
        return {subjects.instance_key(NAMESPACE, "worker", self.instance): INSTANCE.encode(entry, JSON_HEADER)}

    async def _operate(self, message: Message) -> None:
        asked = OPERATE_WORKER.decode(message.payload)
        self.orders.append(asked)
        answer = self.fails
        if answer is None:
            self.state = ASLEEP if asked.operation == "sleep" else ""
            await self.publish()
            answer = WorkerOperated(self.instance, state=self.state)
        await self.device.bus.publish(message.reply, WORKER_OPERATED.encode(answer))

    async def report(self, output_tokens: int, *attempts: tuple[str, int]) -> None:
        report = LoadReport(
            *(self.instance, 1, 0, 0, 0, 0, 4, 0, 0), attempts=list(attempts), output_tokens=output_tokens
        )
        await self.device.bus.publish(subjects.worker(NAMESPACE, self.instance, "load"), LOAD_REPORT.encode(report))


class Device:
    """A coordinator, and what frontends ask it."""

    def __init__(self) -> None:
        self.broker, self.store = MemoryBroker(), MemoryStore()
        self.bus = MemoryBus(self.broker)
        self.runtime: Runtime | None = None

    async def worker(self, model: str, instance: str = "", started: float = 0.0) -> SleepyWorker:
        worker = SleepyWorker(self, model, instance or f"worker-{model}", started)
        await worker.start()
        return worker

    async def want(self, model: str, waiting: int = 1) -> ModelTurn:
        want = WANT_MODEL.encode(WantModel("f1", model, waiting, 0.0))
        reply = await self.bus.request(subjects.turns(NAMESPACE, "gpu0"), want, timeout_s=LIMIT_S)
        return MODEL_TURN.decode(reply.payload)

    async def wanted_until(self, model: str, holds: Callable[[ModelTurn], bool]) -> ModelTurn:
        """Ask for a model again and again, as a frontend does."""
        return await eventually(lambda: self.want(model), holds)

    def metric(self, name: str, **labels: str) -> float:
        assert self.runtime is not None
        return summed(self.runtime.registry, name, **labels)


async def eventually(ask: Callable[[], Awaitable[ModelTurn]], holds: Callable[[ModelTurn], bool]) -> ModelTurn:
    async with asyncio.timeout(LIMIT_S):
        while not holds(turn := await ask()):  # noqa: ASYNC110 - it is asked again, as frontends do
            await asyncio.sleep(0.01)
    return turn


@asynccontextmanager
async def coordinating(
    device: Device, config: TurnsConfig = CONFIG, instance: str = "c1"
) -> AsyncIterator[Coordinator]:
    """A coordinator that runs; on leaving it stops."""
    async with AsyncExitStack() as opened:
        bus = MemoryBus(device.broker)
        runtime = await opened.enter_async_context(
            fake_runtime(NAMESPACE, "turns", instance, bus, device.broker, device.store)
        )
        device.runtime = runtime
        coordinator = Coordinator(runtime, config)
        running = runtime.tasks.create_task(coordinator.run())
        async with asyncio.timeout(LIMIT_S):
            while runtime.health.reasons and not running.done():  # noqa: ASYNC110 - nothing is called for it
                await asyncio.sleep(0.005)
        try:
            yield coordinator
        finally:
            runtime.stopping.set()
            await asyncio.wait((running,))


def is_awake(turn: ModelTurn) -> bool:
    return turn.stage == "awake"


async def test_a_model_wakes_as_requests_wait_for_it_and_another_one_falls_asleep_for_it() -> None:
    device = Device()
    a, b = await device.worker("a"), await device.worker("b")
    async with coordinating(device):
        await device.wanted_until("a", is_awake)
        await device.want("a", 0)
        await device.wanted_until("b", is_awake)
        assert (a.state, b.state) == (ASLEEP, "")
        assert [order.operation for order in a.orders] == ["wake", "sleep"]
        assert (a.orders[1].level, a.orders[1].drain_s) == (1, 7.0)
        assert device.metric("headrace_turn_operations_total", operation="wake", outcome="done") == 2
        state = await device.bus.request(subjects.turns_state(NAMESPACE, "c1"), b"", timeout_s=LIMIT_S)
        shown = TURNS_STATE.decode(state.payload)
        assert (shown.device, shown.awake) == ("gpu0", 1)
        assert {turn.model: turn.stage for turn in shown.models} == {"a": "asleep", "b": "awake"}


async def test_a_coordinator_that_is_started_again_learns_who_is_awake_and_who_is_waited_for() -> None:
    device = Device()
    a, b = await device.worker("a"), await device.worker("b")
    async with coordinating(device):
        await device.wanted_until("a", is_awake)
    async with coordinating(device, instance="c2"):
        await device.wanted_until("b", is_awake)
        assert (a.state, b.state) == (ASLEEP, "")


async def test_a_worker_that_computes_keeps_its_turn_and_one_that_drew_tokens_was_used() -> None:
    device = Device()
    a, _ = await device.worker("a"), await device.worker("b")
    config = TurnsConfig(namespace=NAMESPACE, device="gpu0", turn_s=600.0, least_awake_s=0.0)
    async with coordinating(device, config):
        await device.wanted_until("a", is_awake)
        await device.want("a", 0)
        await a.report(1, ("r", 1))
        for number in range(2, 60):  # for longer than what is not in use stays
            await a.report(number)
            assert (await device.want("b")).stage == "asleep"
            await asyncio.sleep(0.02)
        assert a.state == ""
        await a.report(59)
        await device.wanted_until("b", is_awake)
        assert a.state == ASLEEP


async def test_a_wake_that_fails_is_said_to_those_who_wait() -> None:
    device = Device()
    a = await device.worker("a")
    a.fails = WorkerOperated("worker-a", "wake: no memory", state=ASLEEP)
    async with coordinating(device):
        turn = await device.wanted_until("a", lambda turn: turn.failed != "")
        assert (turn.stage, turn.failed) == ("asleep", "wake: no memory")
        assert len(a.orders) == 1
        assert device.metric("headrace_turn_operations_total", operation="wake", outcome="failed") == 1


async def test_a_worker_that_does_something_else_or_does_not_answer_is_asked_again() -> None:
    device = Device()
    a = await device.worker("a")
    a.fails = WorkerOperated("worker-a", "wake: the engine is starting", state=ASLEEP, busy=True)
    await SleepyWorker(device, "mute", "nobody-listens").publish()
    async with coordinating(device):
        turn = await device.wanted_until("a", lambda turn: "engine" in turn.why)
        assert turn.failed == ""
        a.fails = None
        await device.wanted_until("a", is_awake)
        await device.want("a", 0)
        turn = await device.wanted_until("mute", lambda turn: turn.stage == "asleep" and "not answer" in turn.why)
        assert (turn.failed, turn.why[:28]) == ("", "its worker does not answer: ")


async def test_a_worker_that_was_killed_makes_room_and_the_one_that_follows_it_counts() -> None:
    device = Device()
    a, b = await device.worker("a"), await device.worker("b")
    async with coordinating(device):
        await device.wanted_until("a", is_awake)
        later = await device.worker("a", "worker-a2", started=1.0)  # that which died is still listed
        await device.wanted_until("b", is_awake)
        assert a.state == ""
        assert a.registration is not None
        await a.registration.close()
        assert b.registration is not None
        await b.registration.close()
        await device.wanted_until("a", is_awake)
        assert later.state == ""
        assert (await device.want("b")).stage == "gone"


async def test_a_second_process_for_the_same_device_is_refused() -> None:
    device = Device()
    async with coordinating(device):
        with pytest.raises(ExceptionGroup) as failed:
            async with coordinating(device, instance="c2"):
                pass
        [wrong] = failed.value.exceptions
        assert isinstance(wrong, ConfigError)
        assert str(wrong) == (
            "device: another process decides already whose turn it is on gpu0; give it all models of it, or this"
            " one a device of its own"
        )
