"""The router's shell: answers questions, hears load and events, and keeps one ModelRouter a model.

    select (queue group, or this router by its id) ─▶ ModelRouter.select ─▶ answer, then Reserved to all routers
    load events, load reports, directory changes   ─▶ ModelRouter, Feed
    explain                                        ─▶ the decisions kept

Whatever cannot be read is counted, logged once a minute, and answered where there is someone to answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import msgspec

from services.router.chains import Chains, Clearing
from services.router.config import RouterConfig
from services.router.feed import Feed
from services.router.metrics import Metrics
from services.router.model_router import ModelRouter
from services.router.policy import load_policy
from services.router.seldom import Seldom
from shared import subjects
from shared.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.discovery import Registration
from shared.errors import BusDown, PayloadTooLarge, ProtocolError
from shared.lifecycle import Runtime
from shared.messages import (
    JSON_HEADER,
    LOAD_EVENTS,
    LOAD_REPORT,
    SELECT,
    SELECT_REPLY,
    EventSource,
    LoadEvents,
    ModelCard,
    Reserved,
    Select,
    SelectRefused,
    SelectReply,
    is_json,
)
from shared.messaging import Message, Receive, Subscription

QUEUE = "router"
EXPLAINED_AT_ONCE = 20
MODELS_LIMIT = 256
"""Names kept, served or not: each has an index. Cards of further models are left out, loudly."""
_SLICE_BLOCKS = 1024
_TICK_S = 0.1

_log = logging.getLogger(__name__)


async def serve(runtime: Runtime, config: RouterConfig) -> None:
    """Until `runtime.stopping`. Raises ConfigError where the policy is not one."""
    async with router(runtime, config):
        await runtime.stopping.wait()


@asynccontextmanager
async def router(runtime: Runtime, config: RouterConfig) -> AsyncIterator[Router]:
    """A router that answers while the context is open."""
    service = Router(runtime, config)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


class Router:
    """One router process."""

    def __init__(self, runtime: Runtime, config: RouterConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._make_policy = load_policy(config.policy)
        self._draw = Random()  # noqa: S311 - spreads ties, keeps no secret
        self._metrics = Metrics(runtime.registry)
        self._seldom = Seldom()
        self.models: dict[str, ModelRouter] = {}
        self.feeds: dict[str, Feed] = {}
        """By instance; each feeds the chains of one model."""
        self._subscriptions: list[Subscription] = []
        self._registration: Registration | None = None
        self._clearings: deque[Clearing] = deque()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Learn who is there, then answer, then say so."""
        runtime = self._runtime
        await runtime.directory.synced()
        await self._subscribe(subjects.worker(runtime.namespace, "*", "load"), self._load_report)
        runtime.directory.subscribe(self._directory_changed)
        await self._subscribe(subjects.select(runtime.namespace, runtime.instance), self._select)
        self._tasks.append(runtime.tasks.create_task(self._tick()))
        self._registration = await runtime.discovery.register(self._entries)

    async def stop(self) -> None:
        """The address book goes first, so that nobody new asks; then what is asked is answered."""
        if self._registration is not None:
            await self._registration.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        for feed in self.feeds.values():
            feed.close()
        for task in self._tasks:
            task.cancel()

    async def _subscribe(self, subject: str, receive: Receive, queue: str = "") -> None:
        self._subscriptions.append(await self._runtime.bus.subscribe(subject, receive, queue=queue))

    # --- who is there

    def _directory_changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp | InstanceDown):
            instance = change.instance
            if instance.service == "worker":
                self._refresh(instance.instance)
            elif instance.service == "frontend" and isinstance(change, InstanceDown):
                for model in self.models.values():
                    model.frontend_gone(instance.instance)
        else:
            self._refresh(change.card.instance)

    def _refresh(self, worker: str) -> None:
        """Make what we route to agree with the directory, for one worker: it needs an address and a card."""
        directory = self._runtime.directory
        address = directory.instances.get(worker)
        cards = {
            model: card
            for (model, instance), card in directory.cards.items()
            if instance == worker and address is not None
        }
        self._leave_out(cards)
        changed = False
        for name, model in self.models.items():
            if worker in model.cards and model.cards[worker] != cards.get(name):
                changed = True
                self._clear_later(model.card_down(worker))
        for name, card in cards.items():
            self._model(name).card_up(card)
            self.models[name].sends_events(worker, address is not None and address.events is not None)
        stream = address.events if address is not None and cards else None
        feed = self.feeds.get(worker)
        if feed is not None and (changed or feed.stream != stream):
            feed.close()
            del self.feeds[worker]
            for name in cards:
                # A stream that begins anew: what the old one told is not kept under the new one.
                self._clear_later([chains.clear() for chains in self._chains(name, worker).values()])
        if stream is not None and worker not in self.feeds:
            self._follow(worker, stream, min(cards))

    def _leave_out(self, cards: dict[str, ModelCard]) -> None:
        """Takes those out of `cards` that are of models beyond MODELS_LIMIT."""
        new = [name for name in cards if name not in self.models]
        for name in new[max(0, MODELS_LIMIT - len(self.models)) :]:
            del cards[name]
            self._seldom.warn("models", f"{name} is left out: {MODELS_LIMIT} are known already")

    def _follow(self, worker: str, stream: EventSource, model: str) -> None:
        try:
            self.feeds[worker] = Feed(
                self._runtime,
                worker,
                stream,
                self._chains(model, worker),
                self._config.source,
                self._metrics,
                self._seldom,
                lambda clearing: self._clear_later([clearing]),
            )
        except ProtocolError as wrong:
            self._malformed("event source", wrong)
            self.models[model].sends_events(worker, False)

    def _chains(self, model: str, worker: str) -> dict[int, Chains]:
        chains = self.models[model].chains
        return {rank: chains[worker, rank] for instance, rank in chains if instance == worker}

    def _model(self, name: str) -> ModelRouter:
        if name not in self.models:
            self.models[name] = ModelRouter(name, self._runtime.instance, self._config, self._make_policy(), self._draw)
            self._tasks.append(self._runtime.tasks.create_task(self._answer_for(name)))
        return self.models[name]

    async def _answer_for(self, model: str) -> None:
        """From the first worker on; the model stays ours without workers, to answer that there are none."""
        namespace = self._runtime.namespace

        async def explain(message: Message) -> None:
            await self._explain(model, message)

        while True:
            try:
                await self._subscribe(subjects.router_load(namespace, model), self._load_events)
                await self._subscribe(subjects.explain(namespace, model), explain)
                await self._subscribe(subjects.select(namespace, model), self._select, QUEUE)
                return
            except BusDown:
                await asyncio.sleep(_TICK_S)

    # --- questions

    async def _select(self, message: Message) -> None:
        arrived = time.perf_counter()
        if not message.reply:
            self._malformed("select", ProtocolError(f"{message.subject}: no reply subject"))
            return
        try:
            ask = SELECT.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            self._malformed("select", wrong)
            await self._answer(message, SelectRefused("", 0, "bad_request", str(wrong)), arrived)
            return
        reply, reserved = self._choose(ask)
        if not await self._answer(message, reply, arrived):
            if reserved is not None:
                self.models[ask.model].load.finished((ask.request, ask.attempt))
            return
        if reserved is not None:
            await self._tell(ask.model, reserved)

    def _choose(self, ask: Select) -> tuple[SelectReply, Reserved | None]:
        model = self.models.get(ask.model)
        if model is None:
            reason = f"no worker has served the model {ask.model[:200]} since this router started"
            return SelectRefused(ask.request[:256], ask.attempt, "unknown_model", reason), None
        errors = model.policy_errors
        choice = model.select(ask, time.monotonic())
        if model.policy_errors > errors:
            self._metrics.policy_errors.inc()
            self._seldom.warn(f"policy {self._config.policy}", model.policy_error)
        return choice.reply, choice.reserved

    async def _answer(self, message: Message, reply: SelectReply, arrived: float) -> bool:
        payload = SELECT_REPLY.encode(reply, message.headers)
        try:
            await self._runtime.bus.publish(
                message.reply, payload, headers=JSON_HEADER if is_json(message.headers) else None
            )
        except (BusDown, PayloadTooLarge) as wrong:
            self._seldom.warn("select", wrong)
            return False
        self._metrics.answered(reply, time.perf_counter() - arrived)
        return True

    async def _tell(self, model: str, reserved: Reserved) -> None:
        """To the other routers; one that misses it sees the attempt in the worker's report."""
        payload = LOAD_EVENTS.encode(LoadEvents(model, [reserved]))
        try:
            await self._runtime.bus.publish(subjects.router_load(self._runtime.namespace, model), payload)
        except BusDown as wrong:
            self._seldom.warn("reserved", wrong)

    async def _explain(self, model: str, message: Message) -> None:
        """The payload is a request id, as an answer's `id` has it too, or empty for the last decisions; JSON comes."""
        if not message.reply:
            return
        request = message.payload.decode("utf-8", "replace").strip().strip('"')
        request = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
        decisions = self.models[model].explain(request)[-EXPLAINED_AT_ONCE:]
        answer = {"model": model, "router": self._runtime.instance, "decisions": decisions}
        try:
            await self._runtime.bus.publish(message.reply, msgspec.json.encode(answer), headers=JSON_HEADER)
        except (BusDown, PayloadTooLarge) as wrong:
            self._seldom.warn("explain", wrong)

    # --- what others tell

    async def _load_events(self, message: Message) -> None:
        try:
            batch = LOAD_EVENTS.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            self._malformed("load events", wrong)
            return
        model = self.models.get(batch.model)
        if model is None:
            return
        now_s = time.monotonic()
        for event in batch.events:
            try:
                prediction = model.told(event, now_s)
            except ProtocolError as wrong:
                self._malformed("load events", wrong)
                continue
            if prediction is not None:
                self._metrics.predicted(prediction.prompt_tokens, prediction.predicted_tokens, prediction.actual_tokens)

    async def _load_report(self, message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            self._malformed("load report", wrong)
            return
        now_s = time.monotonic()
        for model in self.models.values():
            model.reported(report, now_s)
        feed = self.feeds.get(report.instance)
        if feed is not None:
            feed.reported(report.kv)

    def _malformed(self, channel: str, wrong: ProtocolError) -> None:
        self._metrics.malformed.labels(channel).inc()
        self._seldom.warn(channel, wrong)

    # --- by and by

    def _clear_later(self, clearings: list[Clearing]) -> None:
        self._clearings.extend(clearing for clearing in clearings if clearing.step(_SLICE_BLOCKS))

    async def _tick(self) -> None:
        """Work that waits for nobody: clearing, expiring, gauges. In slices, so that no choice waits for it."""
        while True:
            await asyncio.sleep(_TICK_S)
            while self._clearings:
                if not self._clearings[0].step(_SLICE_BLOCKS):
                    self._clearings.popleft()
                await asyncio.sleep(0)
            for model in list(self.models.values()):
                now_s = time.monotonic()
                for entries in (model.speculation, model.history):
                    more = True
                    while more:
                        more = entries.expire(now_s, blocks=_SLICE_BLOCKS)
                        await asyncio.sleep(0)
            self._show()
            if self._runtime.stopping.is_set():
                continue
            if self._runtime.bus.connected:
                self._runtime.vitals.ready()
            else:
                self._runtime.vitals.unready("NATS cannot be reached")

    def _show(self) -> None:
        models = list(self.models.values())
        self._metrics.indexed([model.index.statistics() for model in models])
        load = [model.load.statistics() for model in models]
        self._metrics.reservations.set(sum(each.reservations for each in load))
        self._metrics.forgotten.set(sum(each.forgotten for each in load))
        states = ["refused" if feed.refused else feed.source.state for feed in self.feeds.values()]
        for state in ("syncing", "live", "replaying", "refused"):
            self._metrics.sources.labels(state).set(states.count(state))

    def _entries(self, epoch: int) -> dict[str, bytes]:
        namespace, instance = self._runtime.namespace, self._runtime.instance
        operations = {
            "control": subjects.control(namespace, "router", instance),
            "select": subjects.select(namespace, instance),
        }
        return self._runtime.address(epoch, operations)
