"""The process that decides whose turn it is on a device: decider.py decides, this module carries it out.

discovery: which workers take turns, awake or asleep ─┐
NATS: load reports of workers                         ├─▶ DeviceTurns ─▶ OperateWorker: sleep, wake ─▶ its answer
NATS: WantModel of frontends ◀── ModelTurn            ┘        ▲                                          │
                                                               └──────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging

from services.worker.turns.config import TurnsConfig
from services.worker.turns.decider import DeviceTurns, TurnOrder
from services.worker.turns.metrics import TurnsMetrics
from shared import subjects
from shared.bus.contract import Message
from shared.discovery.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.errors import BusDown, ConfigError, ProtocolError, Unavailable
from shared.messages.cards import ASLEEP, Instance
from shared.messages.load import LOAD_REPORT
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker
from shared.messages.turns import MODEL_TURN, TURNS_STATE, WANT_MODEL, TurnsState, TurnStage, WantModel
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime

TICK_S = 0.1
"""Seconds between two decisions, if nothing happens."""
ENGINES_S = 360.0
"""Seconds that a worker has for a wake or a sleep, its drain not counted: more than it gives its engine."""
RIVAL_LIMIT_S = 1.0
"""Seconds that another process for the same device has to answer."""

_STAGES: dict[str, TurnStage] = {"": "awake", ASLEEP: "asleep"}
"""A worker's state → the stage of its model; any other state is drained."""

_log = logging.getLogger(__name__)


async def serve(runtime: Runtime, config: TurnsConfig) -> None:
    """Serve until `runtime.stopping`. Raise ConfigError if another process decides for the device."""
    await Coordinator(runtime, config).run()


class Coordinator:
    """Carries out the turns of one device. `now` is the loop's clock."""

    def __init__(self, runtime: Runtime, config: TurnsConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._now = asyncio.get_running_loop().time
        self.turns = DeviceTurns(config)
        self._metrics = TurnsMetrics(runtime.registry)
        self._limited_log = RateLimitedLog()
        self._workers: dict[str, Instance] = {}
        """The workers of the device by their ids."""
        self._drawn: dict[str, int] = {}
        """Worker → the tokens that it has drawn, as it reported last."""
        self._orders: dict[str, asyncio.Task[None]] = {}
        """Model → the task that had its worker do something last."""

    async def run(self) -> None:
        """Decide until `runtime.stopping`. What workers do then, they end by themselves."""
        runtime, namespace = self._runtime, self._runtime.namespace
        subject = subjects.turns(namespace, self._config.device)
        await runtime.directory.synced()
        await self._refuse_rival(subject)
        receivers = {
            subject: self._wanted,
            subjects.turns_state(namespace, runtime.instance): self._answer_state,
            subjects.worker(namespace, "*", "load"): self._reported,
        }
        runtime.directory.subscribe(self._directory_changed)
        subscriptions = [await runtime.bus.subscribe(subject, receive) for subject, receive in receivers.items()]
        operations = {"control": subjects.control(namespace, "turns", runtime.instance), "want": subject}
        registration = await runtime.discovery.register(lambda epoch: runtime.address(epoch, operations))
        runtime.health.ready()
        deciding = runtime.tasks.create_task(self._decide_on(), name="decide")
        try:
            await runtime.stopping.wait()
        finally:
            for task in (deciding, *self._orders.values()):
                task.cancel()
            await registration.close()
            await asyncio.gather(*(subscription.unsubscribe() for subscription in subscriptions))

    async def _refuse_rival(self, subject: str) -> None:
        """Raise ConfigError if another process decides for the device. One that is frozen is not noticed."""
        question = WANT_MODEL.encode(WantModel(self._runtime.instance, "", 0, 0.0))
        try:
            await self._runtime.bus.request(subject, question, timeout_s=RIVAL_LIMIT_S)
        except Unavailable:
            return
        device = self._config.device
        raise ConfigError(
            f"device: another process decides already whose turn it is on {device}; give it all models of it, or"
            " this one a device of its own"
        )

    async def _decide_on(self) -> None:
        while True:
            self._act()
            for turn in self.turns.shown(self._now()):
                self._metrics.show(turn)
            await asyncio.sleep(TICK_S)

    def _act(self) -> None:
        """Carry out what follows from all that is known now."""
        for order in self.turns.decide(self._now()):
            former = self._orders.get(order.model)
            if former is not None:
                former.cancel()  # it has ended, or its worker is gone
            _log.info("%s %s", order.operation, order.model)
            name = f"{order.operation} {order.model}"
            self._orders[order.model] = self._runtime.tasks.create_task(self._carry_out(order), name=name)

    async def _carry_out(self, order: TurnOrder) -> None:
        """Have a worker sleep or wake, and pass its answer on."""
        config, began_s = self._config, self._now()
        asked = OperateWorker(order.operation, level=config.level, drain_s=config.drain_s, engine_s=config.change_s)
        subject = subjects.worker(self._runtime.namespace, order.instance, "operate")
        aim: TurnStage = "awake" if order.operation == "wake" else "asleep"
        stage: TurnStage | None = None
        busy = True
        try:
            limit_s = ENGINES_S + config.drain_s  # a worker that is frozen is noticed before, as it reports nothing
            reply = await self._runtime.bus.request(subject, OPERATE_WORKER.encode(asked), timeout_s=limit_s)
            answer = WORKER_OPERATED.decode(reply.payload, reply.headers)
            stage, busy = _STAGES.get(answer.state, "drained"), answer.busy
            failed = "" if stage == aim else answer.failed or f"its worker is {answer.state}"
        except (Unavailable, ProtocolError) as wrong:
            failed = f"its worker does not answer: {wrong}"
        outcome = "done" if not failed else "busy" if busy else "failed"
        self._metrics.count(order.operation, outcome, self._now() - began_s)
        if failed:
            self._limited_log.warn(f"{order.operation} {order.model}", failed)
        self.turns.answered(order, failed, stage, busy=busy, now_s=self._now())
        self._act()

    # --- what is seen and asked

    def _directory_changed(self, change: DirectoryChange) -> None:
        match change:
            case InstanceUp(instance) if instance.turns is not None and instance.turns.device == self._config.device:
                self._workers[instance.instance] = instance
                self._see(instance.turns.card.model)
            case InstanceUp(instance) | InstanceDown(instance) if instance.instance in self._workers:
                self._drawn.pop(instance.instance, None)
                gone = self._workers.pop(instance.instance)
                assert gone.turns is not None
                self._see(gone.turns.card.model)
            case _:
                pass

    def _see(self, model: str) -> None:
        """Pass on which worker has the model: the one that started last, as one that died is listed for a while."""
        mine = [each for each in self._workers.values() if each.turns is not None and each.turns.card.model == model]
        newest = max(mine, key=lambda each: (each.started, each.instance), default=None)
        if newest is None:
            self.turns.worker_seen(model, "", "gone", self._now())
        elif not self.turns.worker_seen(model, newest.instance, _STAGES.get(newest.state, "drained"), self._now()):
            self._limited_log.error("models", f"{model} gets no turn: too many models take turns on this device")

    async def _reported(self, message: Message) -> None:
        report = LOAD_REPORT.decode(message.payload)
        worker = self._workers.get(report.instance)
        if worker is None or worker.turns is None:
            return
        before = self._drawn.get(report.instance, report.output_tokens)
        self._drawn[report.instance] = report.output_tokens
        busy = bool(report.attempts) or report.output_tokens != before
        self.turns.worker_reported(worker.turns.card.model, report.instance, busy=busy, now_s=self._now())

    async def _wanted(self, message: Message) -> None:
        want = WANT_MODEL.decode(message.payload, message.headers)
        self.turns.wanted(want, self._now())
        self._act()
        turn = self.turns.wanted(want, self._now())  # again: it may be waking now
        await self._answer(message, MODEL_TURN.encode(turn, message.headers))

    async def _answer_state(self, message: Message) -> None:
        config, models = self._config, self.turns.shown(self._now())
        state = TurnsState(self._runtime.instance, config.device, config.awake, models)
        await self._answer(message, TURNS_STATE.encode(state, message.headers))

    async def _answer(self, message: Message, payload: bytes) -> None:
        if not message.reply:
            raise ProtocolError(f"{message.subject}: no reply subject")
        try:
            await self._runtime.bus.publish(message.reply, payload, headers=message.reply_headers())
        except BusDown as wrong:  # it is asked again
            self._limited_log.warn("no answer", wrong)
