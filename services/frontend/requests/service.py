"""The shell around the sessions: carries out their actions on the bus and brings back what comes of it.

Ask, Offer           ─▶ requests/calls.py ─▶ what routers and workers answer
Withdraw, Tell       ─▶ the outbox
Emit, Finish, Fail   ─▶ the request's Stream
step frames, the deadline, a client that leaves ─▶ events; attempts gone quiet, lost instances: requests/watchdog.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import assert_never

import msgspec

from services.frontend.auth.accounts import Account
from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.output.output import Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat_chunks import CachedTokensByTier
from services.frontend.requests.admission import Admission, Place
from services.frontend.requests.calls import Questions
from services.frontend.requests.cancel_latency import Withdrawals
from services.frontend.requests.inflight import Running
from services.frontend.requests.retry import Tries
from services.frontend.requests.session import (
    Action,
    Again,
    Ask,
    ClientGone,
    Emit,
    Event,
    Expired,
    Fail,
    Finish,
    Later,
    Note,
    Offer,
    Received,
    Session,
    StopFound,
    Tell,
    Withdraw,
)
from services.frontend.requests.stream import Job, Reader, Stream
from services.frontend.requests.watchdog import Watch
from shared import subjects
from shared.bus.contract import Message
from shared.bus.outbox import Outbox
from shared.errors import RateLimited, Unavailable
from shared.messages import CANCEL, STEP_FRAME, Cancel, LoadEvent, Part, Prefilled
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.lifecycle import Runtime

BATCH_S = 0.005
"""Load events and Cancels that come up within it go out together."""

TURN_PARTS = 128
"""Parts of a frame taken in before the loop gets a turn: about a millisecond."""


class Frontend:
    """All requests of this process."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics) -> None:
        self._runtime = runtime
        self.limits = limits
        self._metrics = metrics
        self._outbox = Outbox(runtime.bus, runtime.namespace, runtime.registry, batch_s=BATCH_S)
        self._running: dict[str, Running] = {}
        self._withdrawals = Withdrawals(metrics.cancellation)
        self._questions = Questions(runtime, limits, metrics, self._feed)
        self._watch = Watch(runtime, limits, metrics, self._running, self._feed)
        self.admission = Admission(limits, lambda bound: metrics.rejections.labels(bound).inc())
        self._limited_log = RateLimitedLog()
        self._abandoned = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Listen for step frames, load reports and lost instances."""
        runtime = self._runtime
        subject = subjects.stream(runtime.namespace, runtime.instance)
        await runtime.bus.subscribe(subject, self._on_frame, dropped=self._on_dropped)
        await self._watch.start()
        runtime.tasks.create_task(self._outbox.run(), name="outbox")

    @contextmanager
    def arriving(self, account: Account | None = None) -> Iterator[Place]:
        """A request whose body is on its way, and whose it is, where keys are asked for. Raises Overloaded, or
        Unavailable once this process is about to end."""
        clock = asyncio.get_running_loop().time
        place = self.admission.enter(account)
        if account is not None:
            try:
                account.begin_request(clock())
            except RateLimited:
                self.admission.leave(place)
                raise
        self._metrics.inflight.inc()
        self._idle.clear()
        try:
            yield place
        finally:
            self.admission.leave(place)
            if account is not None:
                account.end_request(place.spent, clock())
            self._metrics.inflight.dec()
            if not self.admission.places:
                self._idle.set()

    @contextmanager
    def admitted(self, body_bytes: int, account: Account | None = None) -> Iterator[Place]:
        """A request whose body is there. Raises as `arriving` does."""
        with self.arriving(account) as place:
            place.grow(body_bytes)
            place.begin()
            yield place

    async def idle(self) -> None:
        """Returns once no request is running and all that had to be told is told (or NATS is away)."""
        await self._idle.wait()
        await self._outbox.flush()

    def abandon(self) -> None:
        """What still runs ends with an error, so that its clients are told; so does what is opened from now on."""
        self._abandoned = True
        for one in self._running.values():
            one.stream.end(Fail(Unavailable("this frontend has ended before the answer was complete")))

    @asynccontextmanager
    async def open(
        self, job: Job, output: Output | ParsedOutput, deadline: float, reader: Reader | None = None
    ) -> AsyncIterator[Stream]:
        """Compute a request until `deadline`, on the loop's clock; leaving before its end cancels it. `reader`: of its
        stream and others. Raises Unavailable once this process gives up what runs."""
        if self._abandoned:
            raise Unavailable("this frontend is about to end")
        tries = Tries(self.limits.attempts, self.limits.rescue_s)
        session = Session(
            job.request,
            job.sampling.max_tokens,
            tries,
            embedding_bytes=4 * job.embedding_size,
            held_by=job.held_by,
            wait_s=0.0 if job.follows else self.limits.wait_s,
        )
        stream = Stream(job, session, output, reader)
        loop = asyncio.get_running_loop()
        one = Running(stream, loop.time(), deadline)
        one.timer = loop.call_at(one.deadline, self._feed, one, Expired())
        self._running[job.request] = one
        if not job.repeats:
            self._metrics.input_tokens.observe(job.prompt_tokens)
        try:
            self._do(one, stream.session.start())
            yield stream
        finally:
            self._withdrawals.begin(stream.session, loop.time())
            self._feed(one, ClientGone())
            self._close(one)

    # --- events in

    def _feed(self, one: Running, event: Event) -> None:
        one.last_sign = asyncio.get_running_loop().time()
        self._do(one, one.stream.session.on(event))

    async def _on_frame(self, message: Message) -> None:
        frame = STEP_FRAME.decode(message.payload)
        if not self._watch.due(frame):
            return
        try:
            for start in range(0, len(frame.parts), TURN_PARTS):
                if start:
                    await asyncio.sleep(0)  # frames wait for one another, but nothing else waits for a whole frame
                self._take_in(frame.instance, frame.parts[start : start + TURN_PARTS])
        finally:
            self._watch.read()

    def _take_in(self, instance: str, parts: Sequence[Part]) -> None:
        """Nearly all parts bring one token to a stream that has had some; they touch it once, and nothing wakes up."""
        now = asyncio.get_running_loop().time()
        gaps_s: list[float] = []
        for part in parts:
            one = self._running.get(part.request)
            if one is None:
                self._stray(instance, part, now)
            elif (token := one.stream.session.continued(instance, part)) < 0:
                self._feed(one, Received(instance, part))
            else:
                assert one.last_tokens is not None, "a stream that continues has had tokens"
                gaps_s.append(now - one.last_tokens)
                one.last_sign = one.last_tokens = now
                if one.stream.take((token,), None):
                    self._feed(one, StopFound())
        self._metrics.inter_token.observe_all(gaps_s)

    def _stray(self, instance: str, part: Part, now: float) -> None:
        """The request is over here."""
        if part.finish is None:
            self._metrics.stray_parts.inc()
            self._cancel(instance, Cancel(part.request, part.attempt))
        else:
            self._withdrawals.ended(part.request, part.attempt, now)

    def _on_dropped(self, _count: int) -> None:
        self._metrics.dropped_frames.inc()
        self._limited_log.warn("step frames come faster than they are read", "frames are lost")

    # --- actions out

    def _do(self, one: Running, actions: Sequence[Action]) -> None:
        tasks = self._runtime.tasks
        for action in actions:
            match action:
                case Emit():
                    self._emit(one, action)
                case Ask():
                    tasks.create_task(self._questions.ask(one, action), name=f"select {one.stream.job.request}")
                case Later():
                    tasks.create_task(self._again(one, action), name=f"wait {one.stream.job.request}")
                case Offer():
                    if action.attempt > 1:
                        self._metrics.migrations.inc()
                    tasks.create_task(self._questions.offer(one, action), name=f"generate {one.stream.job.request}")
                case Withdraw():
                    self._cancel(action.instance, Cancel(one.stream.job.request, action.attempt))
                case Note():
                    self._note(one, action)
                case Tell():
                    self._tell(one, action.event)
                case Finish() | Fail():
                    one.stream.end(action)
                    self._close(one)
                case _:
                    assert_never(action)

    async def _again(self, one: Running, later: Later) -> None:
        """With jitter: a worker that goes leaves many who wait."""
        await asyncio.sleep(later.for_s * self._runtime.draw.uniform(0.5, 1.0))
        self._feed(one, Again(later.attempt, asyncio.get_running_loop().time()))

    def _note(self, one: Running, note: Note) -> None:
        self._metrics.lost.labels(note.loss).inc()
        if note.fruitful:
            one.waiting_since = asyncio.get_running_loop().time()

    def _cancel(self, worker: str, attempt: Cancel) -> None:
        """While NATS is away it is dropped: a worker that streams on is cancelled again by its own parts."""
        self._metrics.cancellations.inc()
        self._outbox.post(subjects.worker(self._runtime.namespace, worker, "cancel"), CANCEL.encode(attempt))

    def _tell(self, one: Running, event: LoadEvent) -> None:
        if isinstance(event, Prefilled):
            cached = CachedTokensByTier.of(event.cached_tokens, event.cached_host_tokens, event.cached_disk_tokens)
            self._metrics.cached_tokens.labels("device").inc(cached.device)
            self._metrics.cached_tokens.labels("host").inc(cached.host)
            self._metrics.cached_tokens.labels("disk").inc(cached.disk)
            if one.last_tokens is None:  # else the client has had its first token from an attempt before this one
                first_token_s = asyncio.get_running_loop().time() - one.started
                event = msgspec.structs.replace(event, first_token_s=first_token_s)
        self._outbox.publish_load(one.stream.job.model, event)

    def _emit(self, one: Running, action: Emit) -> None:
        now = asyncio.get_running_loop().time()
        if one.last_tokens is None:
            self._metrics.first_token.observe(now - one.started)
        else:
            self._metrics.inter_token.observe((now - one.last_tokens) / len(action.tokens))
        one.last_tokens = now
        if one.stream.take(action.tokens, action.logprobs):
            self._feed(one, StopFound())

    def _close(self, one: Running) -> None:
        """The session has ended: forget it. Idempotent."""
        if self._running.get(one.stream.job.request) is not one:
            return
        del self._running[one.stream.job.request]
        assert one.timer is not None
        one.timer.cancel()
        if not one.stream.job.embedding_size:
            self._metrics.output_tokens.observe(len(one.stream.session.tokens))
