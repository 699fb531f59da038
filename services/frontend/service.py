"""The shell around the sessions: carries out their actions on the bus and brings back what comes of it.

Ask      ─▶ a router, then others by their id        ─▶ Selected, SelectRefused, Unrouted
Offer    ─▶ Generate to the chosen worker            ─▶ Accepted, Refused, Unreachable, Unsendable
Withdraw, Tell ─▶ the outbox
Emit, Finish, Fail ─▶ the request's Stream
step frames, lost instances, attempts gone quiet (load reports, Ping), the deadline, a client that leaves ─▶ events
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import assert_never

import msgspec

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.output import Output
from services.frontend.pulses import Pulses
from services.frontend.sessions import (
    Action,
    Ask,
    ClientGone,
    Emit,
    Event,
    Expired,
    Fail,
    Finish,
    InstanceGone,
    Lost,
    Offer,
    Received,
    Session,
    State,
    StopFound,
    Tell,
    Unreachable,
    Unrouted,
    Unsendable,
    Withdraw,
)
from services.frontend.stream import Job, Stream
from shared import subjects
from shared.directory import DirectoryChange, InstanceDown
from shared.errors import NoResponders, Overloaded, PayloadTooLarge, ProtocolError, RequestTimeout, Unavailable
from shared.hashing import pack_tokens
from shared.lifecycle import Runtime
from shared.messages import (
    CANCEL,
    GENERATE,
    GENERATE_REPLY,
    LOAD_REPORT,
    PING,
    SELECT,
    SELECT_REPLY,
    STEP_FRAME,
    Cancel,
    Generate,
    LoadEvent,
    Ping,
    Prefilled,
    Select,
)
from shared.messaging import Message
from shared.outbox import Outbox

ROUTERS_TRIED = 3
"""By their id, after the queue group did not answer."""
SELECT_ROUNDS = 3
"""Where routers are there but slow, all are asked again, with twice the time."""
BATCH_S = 0.005
"""Load events and Cancels that come up within it go out together."""

_log = logging.getLogger(__name__)


class _Running:
    """A stream with the clock readings that belong to it."""

    def __init__(self, stream: Stream, started: float, deadline: float) -> None:
        self.stream = stream
        self.started = started
        self.deadline = deadline
        self.last_sign = started
        """When the present attempt was last heard of."""
        self.last_tokens: float | None = None
        """When tokens came last."""
        self.timer: asyncio.TimerHandle | None = None


class Frontend:
    """All requests of this process."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics) -> None:
        self._runtime = runtime
        self._limits = limits
        self._metrics = metrics
        self._outbox = Outbox(runtime.bus, runtime.namespace, runtime.registry, batch_s=BATCH_S)
        self._running: dict[str, _Running] = {}
        self._pulses = Pulses(quiet_s=limits.quiet_s, frozen_s=limits.frozen_s)
        self.draining = False
        """No new requests: this process is about to end."""
        self._admitted = 0
        self._body_bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Listen for step frames and lost instances."""
        runtime = self._runtime
        subject = subjects.stream(runtime.namespace, runtime.instance)
        await runtime.bus.subscribe(subject, self._on_frame, dropped=self._on_dropped)
        await runtime.bus.subscribe(subjects.worker(runtime.namespace, "*", "load"), self._on_report)
        runtime.directory.subscribe(self._on_change)
        runtime.tasks.create_task(self._outbox.run(), name="outbox")
        runtime.tasks.create_task(self._look_after_the_quiet(), name="look after the quiet")

    @property
    def deadline_s(self) -> float:
        """Of every request, from the moment its body is there."""
        return self._limits.deadline_s

    @contextmanager
    def admitted(self, body_bytes: int) -> Iterator[None]:
        """A place among the running requests, and for its body. Raises Overloaded, or Unavailable while draining."""
        if self.draining:
            raise Unavailable("this frontend is about to end")
        if self._admitted >= self._limits.requests:
            self._metrics.rejections.inc()
            raise Overloaded(f"{self._admitted} requests are running already")
        if self._admitted and self._body_bytes + body_bytes > self._limits.body_bytes:
            self._metrics.rejections.inc()
            raise Overloaded(f"the bodies of {self._admitted} running requests fill {self._body_bytes} bytes already")
        self._admitted += 1
        self._body_bytes += body_bytes
        self._metrics.inflight.inc()
        self._idle.clear()
        try:
            yield
        finally:
            self._admitted -= 1
            self._body_bytes -= body_bytes
            self._metrics.inflight.dec()
            if not self._admitted:
                self._idle.set()

    async def idle(self) -> None:
        """Returns once no request is running and all that had to be told is told (or NATS is away)."""
        await self._idle.wait()
        await self._outbox.flush()

    @asynccontextmanager
    async def open(self, job: Job, output: Output, deadline: float) -> AsyncIterator[Stream]:
        """Compute a request until `deadline`, on the loop's clock; leaving before its end cancels it."""
        stream = Stream(job, Session(job.request, job.sampling.max_tokens), output)
        loop = asyncio.get_running_loop()
        one = _Running(stream, loop.time(), deadline)
        one.timer = loop.call_at(one.deadline, self._feed, one, Expired())
        self._running[job.request] = one
        self._metrics.input_tokens.observe(job.prompt_tokens)
        try:
            self._do(one, stream.session.start())
            yield stream
        finally:
            self._feed(one, ClientGone())
            self._close(one)

    async def faults(self) -> list[str]:
        """Why a request would not be served, as far as bus and routers go; empty: it would."""
        if self.draining:
            return ["this frontend is about to end"]
        if not self._runtime.bus.connected:
            return ["NATS is not connected"]
        routers = self._routers()
        if not routers:
            return ["no router is there"]
        answers = await asyncio.gather(*map(self._answers, routers))
        return [] if any(answers) else ["no router answers"]

    # --- events in

    def _feed(self, one: _Running, event: Event) -> None:
        one.last_sign = asyncio.get_running_loop().time()
        self._do(one, one.stream.session.on(event))

    async def _on_frame(self, message: Message) -> None:
        frame = STEP_FRAME.decode(message.payload)
        for part in frame.parts:
            one = self._running.get(part.request)
            if one is not None:
                self._feed(one, Received(frame.instance, part))
            elif part.finish is None:
                self._metrics.stray_parts.inc()
                self._cancel(frame.instance, Cancel(part.request, part.attempt))

    def _on_change(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceDown):
            self._pulses.forget(change.instance.instance)
            self._gone(change.instance.instance)

    def _gone(self, instance: str) -> None:
        for one in list(self._running.values()):
            if one.stream.session.instance == instance:
                self._feed(one, InstanceGone(instance))

    async def _on_report(self, message: Message) -> None:
        report = LOAD_REPORT.decode(message.payload)
        if report.instance in self._runtime.directory.instances:
            self._pulses.report(report, asyncio.get_running_loop().time())

    async def _look_after_the_quiet(self) -> None:
        """So that a lost last part, a frozen engine or a dead worker ends no request's progress until its deadline."""
        loop = asyncio.get_running_loop()
        while True:
            slept_from = loop.time()
            await asyncio.sleep(self._limits.quiet_s / 2)
            stopped = loop.time() - slept_from > self._limits.quiet_s  # this process itself, by a signal or a long task
            if stopped or not self._runtime.bus.connected:
                self._pulses.hold(loop.time())
            silent: dict[str, None] = {}
            for one in list(self._running.values()):
                session = one.stream.session
                if session.state is not State.STREAMING:
                    continue
                attempt = (session.request, session.attempt)
                match self._pulses.judge(session.instance, attempt, one.last_sign, loop.time()):
                    case "alive":
                        pass
                    case "silent":
                        silent[session.instance] = None
                    case "ended":
                        self._feed(one, Lost(session.attempt, "the worker lost the end of the stream", exclude=False))
                    case "frozen":
                        self._feed(one, Lost(session.attempt, "the worker stands still", exclude=True))
            await asyncio.gather(*map(self._ask_for_life, silent))

    async def _ask_for_life(self, worker: str) -> None:
        """A silent worker that nobody answers for is dead, whatever its lease says; one that is slow has `frozen_s`."""
        subject = subjects.control(self._runtime.namespace, "worker", worker)
        try:
            await self._runtime.bus.request(subject, PING.encode(Ping()), timeout_s=self._limits.quiet_s)
        except NoResponders:
            _log.warning("worker %s is gone: nobody answers for it", worker)
            self._gone(worker)
        except Unavailable as why:
            _log.warning("worker %s is silent: %s", worker, why)

    def _on_dropped(self, count: int) -> None:
        self._metrics.dropped_frames.inc()
        _log.warning("step frames come faster than they are read: %d lost so far", count)

    # --- actions out

    def _do(self, one: _Running, actions: Sequence[Action]) -> None:
        tasks = self._runtime.tasks
        for action in actions:
            match action:
                case Emit():
                    self._emit(one, action)
                case Ask():
                    if action.attempt > 1:
                        self._metrics.migrations.inc()
                    tasks.create_task(self._ask(one, action), name=f"select {one.stream.job.request}")
                case Offer():
                    tasks.create_task(self._offer(one, action), name=f"generate {one.stream.job.request}")
                case Withdraw():
                    self._cancel(action.instance, Cancel(one.stream.job.request, action.attempt))
                case Tell():
                    self._tell(one, action.event)
                case Finish() | Fail():
                    one.stream.end(action)
                    self._close(one)
                case _:
                    assert_never(action)

    def _cancel(self, worker: str, attempt: Cancel) -> None:
        """While NATS is away it is dropped: a worker that streams on is cancelled again by its own parts."""
        self._metrics.cancellations.inc()
        self._outbox.post(subjects.worker(self._runtime.namespace, worker, "cancel"), CANCEL.encode(attempt))

    def _tell(self, one: _Running, event: LoadEvent) -> None:
        if isinstance(event, Prefilled):
            self._metrics.cached_tokens.inc(event.cached_tokens)
            if one.last_tokens is None:  # else the client has had its first token from an attempt before this one
                first_token_s = asyncio.get_running_loop().time() - one.started
                event = msgspec.structs.replace(event, first_token_s=first_token_s)
        self._outbox.tell(one.stream.job.model, event)

    def _emit(self, one: _Running, action: Emit) -> None:
        now = asyncio.get_running_loop().time()
        if one.last_tokens is None:
            self._metrics.first_token.observe(now - one.started)
        else:
            self._metrics.inter_token.observe((now - one.last_tokens) / len(action.tokens))
        one.last_tokens = now
        if one.stream.take(action.tokens, action.logprobs):
            self._feed(one, StopFound())

    def _close(self, one: _Running) -> None:
        """The session has ended: forget it. Idempotent."""
        if self._running.get(one.stream.job.request) is not one:
            return
        del self._running[one.stream.job.request]
        assert one.timer is not None
        one.timer.cancel()
        self._metrics.output_tokens.observe(len(one.stream.session.tokens))

    # --- questions

    async def _ask(self, one: _Running, ask: Ask) -> None:
        job = one.stream.job
        payload = SELECT.encode(
            Select(
                request=job.request,
                attempt=ask.attempt,
                frontend=self._runtime.instance,
                model=job.model,
                hashes=job.hashes,
                prompt_tokens=job.prompt_tokens + ask.produced,
                max_tokens=job.sampling.max_tokens - ask.produced,
                excluded=ask.excluded,
                session=job.session,
            )
        )
        for number in range(SELECT_ROUNDS):
            timeout_s = self._limits.select_timeout_s * 2**number
            slow = False
            for tried, addressee in enumerate((job.model, *self._routers())):
                if not one.stream.session.chooses(ask.attempt):
                    return
                if number or tried:
                    self._metrics.router_retries.inc()
                try:
                    reply = await self._runtime.bus.request(
                        subjects.select(self._runtime.namespace, addressee), payload, timeout_s=timeout_s
                    )
                    self._feed(one, SELECT_REPLY.decode(reply.payload))
                    return
                except Unavailable as why:
                    slow = slow or isinstance(why, RequestTimeout)
                    _log.warning("request %s: router %s: %s", job.request, addressee, why)
                except ProtocolError as wrong:
                    _log.error("request %s: router %s: %s", job.request, addressee, wrong)
            if not slow:
                break
        away = not self._runtime.bus.connected
        self._feed(one, Unrouted(ask.attempt, "NATS is not connected") if away else Unrouted(ask.attempt))

    async def _offer(self, one: _Running, offer: Offer) -> None:
        job = one.stream.job
        message = Generate(
            request=job.request,
            attempt=offer.attempt,
            model=job.model,
            frontend=self._runtime.instance,
            tokens=job.prompt + pack_tokens(one.stream.session.tokens),
            prompt_tokens=job.prompt_tokens,
            sampling=job.sampling,
            time_left_s=max(0.0, one.deadline - asyncio.get_running_loop().time()),
            rank=offer.rank,
            salt=job.salt,
        )
        subject = subjects.worker(self._runtime.namespace, offer.instance, "generate")
        event: Event
        try:
            reply = await self._runtime.bus.request(
                subject, GENERATE.encode(message), timeout_s=self._limits.offer_timeout_s
            )
            event = GENERATE_REPLY.decode(reply.payload)
        except PayloadTooLarge as wrong:
            event = Unsendable(offer.attempt, str(wrong))
        except (Unavailable, ProtocolError) as why:
            _log.warning("request %s: worker %s: %s", job.request, offer.instance, why)
            event = Unreachable(offer.attempt, str(why))
        self._feed(one, event)

    def _routers(self) -> list[str]:
        """A few routers, in random order: nobody knows which of them is frozen."""
        routers = [one.instance for one in self._runtime.directory.instances.values() if one.service == "router"]
        return self._runtime.draw.sample(routers, min(ROUTERS_TRIED, len(routers)))

    async def _answers(self, router: str) -> bool:
        subject = subjects.control(self._runtime.namespace, "router", router)
        try:
            await self._runtime.bus.request(subject, PING.encode(Ping()), timeout_s=self._limits.select_timeout_s)
        except Unavailable:
            return False
        return True
