"""The router's shell: answers Selects, receives load events and reports, and publishes its reservations.

    select (queue group, or this router by its id) ─▶ ModelRouter.select ─▶ answer; Reserved into the outbox, if there
                                                                            are other routers
    load events, load reports, kvbms' reports      ─▶ ModelRouter, EventFeed
    explain, state                                 ─▶ answers to users: queries.py
    reservations                                   ─▶ sent to a router that starts: replica_sync.py
    directory changes                              ─▶ models and feeds: sync/follower.py

The router answers Selects for a model once it receives the model's load events and has copied the reservations of
another router. A message that cannot be read is counted, logged at most once a minute, and answered if it has a reply
subject.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from services.router import replica_sync
from services.router.choice_span import choice_span
from services.router.config import RouterConfig
from services.router.index.inheritance import store_id
from services.router.metrics import ModelGauges, RouterMetrics
from services.router.queries import Queries
from services.router.selection.left_out import KINDS, LeftOutWorkers
from services.router.selection.model_router import ModelRouter
from services.router.selection.policy_guard import PolicyFault
from services.router.sync.follower import DirectoryFollower
from shared import subjects
from shared.bus.contract import Message, Receive, Subscription
from shared.bus.outbox import Outbox
from shared.discovery.contract import Registration
from shared.errors import BusDown, ProtocolError
from shared.messages.kvbm import KVBM_REPORT
from shared.messages.load import LOAD_REPORT
from shared.messages.select import (
    LOAD_EVENTS,
    RESERVATIONS_REQUEST,
    SELECT,
    SELECT_REPLY,
    LoadEvents,
    Reserved,
    Select,
    Selected,
    SelectRefused,
    SelectReply,
)
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime
from shared.tracing.traceparent import TraceParent, carried

QUEUE = "router"
BATCH_S = 0.001
"""Seconds within which reservations are sent out together."""
JOIN_LIMIT_S = 4.0
"""Seconds after which a starting router registers in discovery, even if it still waits for reservations."""
JOINING_ROUTER_S = 30.0
"""Seconds for which a router that asked for reservations counts as present, whether or not discovery shows it."""
SELECTS_PER_TURN = 4
"""Selects answered before the loop gets a turn, if there are other routers. So their reservations are received, and
ours are sent, also within a burst. A turn of the loop has its cost."""
EVENTS_PER_TURN = 256
"""Load events of a batch applied before the loop gets a turn: NATS delivers up to 4096 waiting events at once, which
are 8 ms of work."""
LAYOUTS_PER_REPORT = 1024
"""Most layouts in a kvbm's report; a larger report is refused."""
EVENTS_OFF = "events are off: what workers cache is predicted from this router's own choices"
"""A note in /health and in the log."""
_TICK_S = 0.1
_TICKS_PER_GAUGE_UPDATE = 10

_log = logging.getLogger(__name__)


async def serve(runtime: Runtime, config: RouterConfig) -> None:
    """Run a router until `runtime.stopping`. Raise ConfigError if the policy cannot be loaded."""
    async with router(runtime, config):
        await runtime.stopping.wait()


@asynccontextmanager
async def router(runtime: Runtime, config: RouterConfig) -> AsyncIterator[Router]:
    """Run a router while the context is open."""
    service = Router(runtime, config)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


class Router:
    """One router process. `now` is the loop's clock."""

    def __init__(self, runtime: Runtime, config: RouterConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._now = asyncio.get_running_loop().time
        self._metrics = RouterMetrics(runtime.registry)
        self._metrics.events_followed.set(config.events == "on")
        if config.events == "off":
            runtime.health.also = lambda: {"notes": [EVENTS_OFF]}
            _log.info(EVENTS_OFF)
        self._limited_log = RateLimitedLog()
        self._outbox = Outbox(runtime.bus, runtime.namespace, runtime.registry, batch_s=BATCH_S)
        self._follower = DirectoryFollower(
            runtime,
            config,
            self._metrics,
            self._limited_log,
            model_added=self._model_added,
            model_dropped=self._model_dropped,
        )
        self.models = self._follower.models
        self.feeds = self._follower.feeds
        self._left_out = LeftOutWorkers()
        self._queries = Queries(runtime, config, self.models, self.feeds, self._left_out, self._limited_log)
        self._subscriptions: list[Subscription] = []
        self._model_subscriptions: dict[str, list[Subscription]] = {}
        """Model → subscriptions that are open for it."""
        self._joining: set[asyncio.Task[None]] = set()
        """One task for each model whose Selects are not answered yet."""
        self._registration: Registration | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined_by_s = -math.inf
        """When a router that asked for reservations is in the directory at the latest."""
        self._selects_since_yield = 0
        self._dropped = 0

    async def start(self) -> None:
        """Learn the instances and reservations, then answer Selects, then register in discovery."""
        runtime = self._runtime
        namespace, instance = runtime.namespace, runtime.instance
        await runtime.directory.synced()
        own: dict[str, Receive] = {
            subjects.worker(namespace, "*", "load"): self._load_report,
            subjects.kvbm(namespace, "*", "load"): self._kvbm_report,
            subjects.select(namespace, instance): self._select,
            subjects.reservations(namespace, instance): self._answer_reservations,
            subjects.explain(namespace, instance): self._queries.answer_explain,
            subjects.router_state(namespace, instance): self._queries.answer_state,
            subjects.router_heat(namespace, instance): self._queries.answer_heat,
        }
        for subject, receive in own.items():
            self._subscriptions.append(await runtime.bus.subscribe(subject, receive))
        self._own(self._outbox.run())
        self._follower.start()
        if self._joining:
            await asyncio.wait(self._joining, timeout=JOIN_LIMIT_S)
        self._own(self._tick())
        self._registration = await runtime.discovery.register(self._entries)

    async def stop(self) -> None:
        """Deregister first, so that no frontend sends new Selects; then answer those received, and send out their
        reservations."""
        if self._registration is not None:
            await self._registration.close()
        for task in self._joining:
            task.cancel()
        # All at the same time, because a frozen NATS costs each of them seconds.
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._all_subscriptions()))
        self._queries.close()
        self._follower.close()
        await self._outbox.flush()
        for task in self._tasks:
            task.cancel()

    def _all_subscriptions(self) -> list[Subscription]:
        return [*self._subscriptions, *(each for model in self._model_subscriptions.values() for each in model)]

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._runtime.tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _model_added(self, model: str) -> None:
        task = self._own(self._start_answering(model))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _model_dropped(self, model: str) -> None:
        self._own(self._stop_answering(self._model_subscriptions.pop(model, [])))

    async def _start_answering(self, model: str) -> None:
        """Answer Selects for a model, from its first worker on. A model without workers is kept, to answer that there
        are none."""
        namespace, bus = self._runtime.namespace, self._runtime.bus
        receivers: list[tuple[str, Receive, str]] = [
            (subjects.router_load(namespace, model), self._load_events, ""),
            (subjects.explain(namespace, model), partial(self._queries.answer_explain_of, model), ""),
            (subjects.select(namespace, model), self._select, QUEUE),
        ]
        answering = self._model_subscriptions[model] = []
        for subject, receive, queue in receivers:
            while True:
                try:
                    answering.append(await bus.subscribe(subject, receive, queue=queue))
                    break
                except BusDown:
                    await asyncio.sleep(_TICK_S)
            if len(answering) == 1:  # load events are received from here on
                await replica_sync.fetch_reservations(self._runtime, self.models[model], self._metrics)

    async def _stop_answering(self, answering: list[Subscription]) -> None:
        for subscription in answering:
            await subscription.unsubscribe()

    # --- Selects

    async def _select(self, message: Message) -> None:
        arrived = time.perf_counter()
        parent = carried(message.headers) if message.headers else None
        if not message.reply:
            self._malformed("select", ProtocolError(f"{message.subject}: no reply subject"))
            return
        try:
            select = SELECT.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            self._malformed("select", wrong)
            await self._answer(message, "", SelectRefused("", 0, "bad_request", str(wrong)), arrived)
            return
        reply, reservations, awaited = self._choose(select)
        if parent is not None:
            self._trace(select, reply, parent, arrived)
        answered = await self._answer(message, select.model if select.model in self.models else "", reply, arrived)
        if not reservations:
            return
        for reserved in reservations:
            if not answered:
                self.models[select.model].load.withdraw((reserved.request, reserved.attempt))
            elif self._follower.other_routers or self._now() < self._joined_by_s:
                # A router that misses this event learns of the attempt from the worker's report.
                self._outbox.publish_load(select.model, reserved)
                if awaited is not None and awaited.attempt == reserved.attempt:
                    self._post_awaited(select.model, awaited)
        self._selects_since_yield = (self._selects_since_yield + 1) % SELECTS_PER_TURN
        if not self._selects_since_yield and self._follower.other_routers:
            await asyncio.sleep(0)

    def _post_awaited(self, model: str, awaited: Reserved) -> None:
        """Tell the other routers which blocks a prompt that waits will leave. It is lost while NATS is away."""
        subject = subjects.router_load(self._runtime.namespace, model)
        self._outbox.post(subject, LOAD_EVENTS.encode(LoadEvents(model, [awaited])))

    def _choose(self, select: Select) -> tuple[SelectReply, list[Reserved], Reserved | None]:
        model = self.models.get(select.model)
        if model is None:
            reason = f"no worker has served the model {select.model[:200]} since this router started"
            return SelectRefused(select.request[:256], select.attempt, "unknown_model", reason), [], None
        selection = model.select(select, self._now())
        if selection.fault is not None:
            self._report_fault(select.model, selection.fault)
        reserved = [each for each in (selection.reserved, selection.reserved_decode) if each is not None]
        return selection.reply, reserved, selection.awaited

    def _trace(self, select: Select, reply: SelectReply, parent: TraceParent, arrived: float) -> None:
        """Make the span of a choice, and note its trace for `headrace explain`."""
        model = self.models.get(select.model)
        block_size = 0
        if model is not None and isinstance(reply, Selected):
            model.decisions.record_trace((select.request, select.attempt), parent.trace)
            card = model.cards.get(reply.instance)
            block_size = 0 if card is None else card.block_size
        tracer = self._runtime.tracer
        if tracer is not None:
            end_ns = tracer.now_ns()
            start_ns = end_ns - round(1e9 * (time.perf_counter() - arrived))
            tracer.record([choice_span(tracer.ids, parent, select, reply, block_size, start_ns, end_ns)])

    def _report_fault(self, model: str, fault: PolicyFault) -> None:
        """Count and log a failed or slow choice of the policy."""
        self._metrics.count_policy_fault(model, fault.kind)
        if fault.kind == "off":
            _log.error("policy %s of model %s: %s", self._config.policy, model, fault.problem)
        else:
            self._limited_log.warn(f"policy {self._config.policy}", f"{fault.kind}: {fault.problem}")

    async def _answer(self, message: Message, model: str, reply: SelectReply, arrived: float) -> bool:
        headers = message.reply_headers()
        try:
            await self._runtime.bus.publish(message.reply, SELECT_REPLY.encode(reply, headers), headers=headers)
        except (BusDown, ProtocolError) as wrong:  # too large, or an invalid reply subject
            self._limited_log.warn("select", wrong)
            return False
        self._metrics.count_select(model, reply, time.perf_counter() - arrived)
        return True

    async def _answer_reservations(self, message: Message) -> None:
        try:
            name = RESERVATIONS_REQUEST.decode(message.payload, message.headers).model
            self._joined_by_s = self._now() + JOINING_ROUTER_S
            if message.reply:
                await replica_sync.send_reservations(self._runtime, message, self.models.get(name), name)
        except ProtocolError as wrong:
            self._malformed("reservations", wrong)
        except BusDown as wrong:
            self._limited_log.warn("reservations", wrong)

    # --- load events and reports

    async def _load_events(self, message: Message) -> None:
        try:
            batch = LOAD_EVENTS.decode(message.payload, message.headers)
            model = self.models.get(batch.model)
            if model is None:
                raise ProtocolError(f"load events of the unknown model {batch.model[:200]}")
        except ProtocolError as wrong:
            self._malformed("load events", wrong)
            return
        for number, event in enumerate(batch.events, 1):
            if not number % EVENTS_PER_TURN:
                await asyncio.sleep(0)
            try:
                prediction = model.apply_load_event(event, self._now())
            except ProtocolError as wrong:
                self._malformed("load events", wrong)
                continue
            if prediction is not None:
                self._metrics.count_first_token(
                    batch.model, prediction.prompt_tokens, prediction.predicted_tokens, prediction.actual_tokens
                )
                feed = self.feeds.get(prediction.instance)
                if feed is not None and prediction.new_blocks > 0:
                    feed.prefill_seen(prediction.chosen_s)

    async def _load_report(self, message: Message) -> None:
        try:
            report = LOAD_REPORT.decode(message.payload, message.headers)
        except ProtocolError as wrong:
            self._malformed("load report", wrong)
            return
        now_s = self._now()
        for model in self.models.values():
            model.apply_load_report(report, now_s)
        if report.instance not in self._runtime.directory.instances:
            self._left_out.report_of_unknown(report.instance, now_s)
        feed = self.feeds.get(report.instance)
        if feed is not None:
            feed.load_reported(report.kv)

    async def _kvbm_report(self, message: Message) -> None:
        try:
            report = KVBM_REPORT.decode(message.payload, message.headers)
            if len(report.layouts) > LAYOUTS_PER_REPORT:
                raise ProtocolError(
                    f"a kvbm's report has {len(report.layouts)} layouts; at most {LAYOUTS_PER_REPORT} are allowed"
                )
        except ProtocolError as wrong:
            self._malformed("kvbm report", wrong)
            return
        for model in self.models.values():
            model.caches.apply_kvbm_report(report)
        for layout in report.layouts:
            feed = self.feeds.get(store_id(report.instance, layout.layout))
            if feed is not None:
                feed.layout_reported(layout)

    def _malformed(self, channel: str, wrong: ProtocolError) -> None:
        self._metrics.malformed.labels(channel).inc()
        self._limited_log.warn(channel, wrong)

    # --- timer

    async def _tick(self) -> None:
        """Do the work that no message triggers: cleaning up, expiring, gauges. Gauges are updated less often, because
        they would take a third of an idle router's time."""
        for tick in count():
            await asyncio.sleep(_TICK_S)
            await self._follower.tick()
            if tick % _TICKS_PER_GAUGE_UPDATE == 0:
                self._update_gauges()
                self._look_for_left_out()
            if self._runtime.stopping.is_set():
                continue
            if self._runtime.bus.connected:
                self._runtime.health.ready()
            else:
                self._runtime.health.unready("NATS cannot be reached")

    def _update_gauges(self) -> None:
        self._metrics.show_models({name: _gauges_of(model) for name, model in self.models.items()})
        self._metrics.show_sources([feed.status() for feed in self.feeds.values()])
        dropped = sum(each.statistics().dropped for each in self._all_subscriptions())
        if dropped > self._dropped:
            self._limited_log.warn("messages came faster than they were read", f"{dropped} are lost")
        self._dropped = dropped
        self._metrics.dropped.set(dropped)

    def _look_for_left_out(self) -> None:
        directory = self._runtime.directory
        workers = (each for each in directory.instances.values() if each.service == "worker")
        loads = {name: model.loads() for name, model in self.models.items()}
        found = self._left_out.look(self._now(), workers, directory.cards, directory.refused, loads)
        kinds = [each.kind for each in found]
        for kind in KINDS:
            self._metrics.left_out.labels(kind).set(kinds.count(kind))

    def _entries(self, epoch: int) -> dict[str, bytes]:
        namespace, instance = self._runtime.namespace, self._runtime.instance
        operations = {
            "control": subjects.control(namespace, "router", instance),
            "select": subjects.select(namespace, instance),
            "explain": subjects.explain(namespace, instance),
            "reservations": subjects.reservations(namespace, instance),
            "state": subjects.router_state(namespace, instance),
            "heat": subjects.router_heat(namespace, instance),
        }
        return self._runtime.address(epoch, operations)


def _gauges_of(model: ModelRouter) -> ModelGauges:
    load = model.load.statistics()
    return ModelGauges(
        candidates=sum(card.ranks for card in model.cards.values()),
        standing_still=len(model.eligibility.frozen),
        reservations=load.reservations,
        forgotten=load.forgotten,
        index=model.index.statistics(),
    )
