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
from services.frontend.requests.admission import Admission, Permit
from services.frontend.requests.calls import BusCalls
from services.frontend.requests.cancel_latency import CancelLatency
from services.frontend.requests.inflight import Running
from services.frontend.requests.retry import RetryBudget
from services.frontend.requests.session import (
    Action,
    ClientGone,
    CountLoss,
    DispatchAttempt,
    EmitTokens,
    Event,
    Expired,
    Fail,
    Finish,
    PartReceived,
    PublishLoad,
    RetryDue,
    RetryLater,
    SelectWorker,
    Session,
    StopFound,
    WithdrawAttempt,
)
from services.frontend.requests.stream import InferenceRequest, Stream, StreamSelector
from services.frontend.requests.watchdog import Watchdog
from shared import subjects
from shared.bus.contract import Message
from shared.bus.outbox import Outbox
from shared.errors import RateLimited, Unavailable
from shared.messages import CANCEL, STEP_FRAME, Cancel, LoadEvent, Part, Prefilled
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.lifecycle import Runtime

BATCH_S = 0.005
"""Load events and Cancels that come up within it go out together."""

PARTS_PER_TURN = 128
"""Parts of a frame taken in before the loop gets a turn: about a millisecond."""


class RequestService:
    """All requests of this process."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics) -> None:
        self._runtime = runtime
        self.limits = limits
        self._metrics = metrics
        self._outbox = Outbox(runtime.bus, runtime.namespace, runtime.registry, batch_s=BATCH_S)
        self._running: dict[str, Running] = {}
        self._cancel_latency = CancelLatency(metrics.cancellation)
        self._calls = BusCalls(runtime, limits, metrics, self._feed)
        self._watchdog = Watchdog(runtime, limits, metrics, self._running, self._feed)
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
        await self._watchdog.start()
        runtime.tasks.create_task(self._outbox.run(), name="outbox")

    @contextmanager
    def reserve(self, account: Account | None = None) -> Iterator[Permit]:
        """A request whose body is on its way, and whose it is, where keys are asked for. Raises Overloaded, or
        Unavailable once this process is about to end."""
        clock = asyncio.get_running_loop().time
        place = self.admission.reserve(account)
        if account is not None:
            try:
                account.begin_request(clock())
            except RateLimited:
                self.admission.release(place)
                raise
        self._metrics.inflight.inc()
        self._idle.clear()
        try:
            yield place
        finally:
            self.admission.release(place)
            if account is not None:
                account.end_request(place.spent, clock())
            self._metrics.inflight.dec()
            if not self.admission.permits:
                self._idle.set()

    @contextmanager
    def admit(self, body_bytes: int, account: Account | None = None) -> Iterator[Permit]:
        """A request whose body is there. Raises as `arriving` does."""
        with self.reserve(account) as place:
            place.add_bytes(body_bytes)
            place.admit()
            yield place

    async def wait_idle(self) -> None:
        """Returns once no request is running and all that had to be told is told (or NATS is away)."""
        await self._idle.wait()
        await self._outbox.flush()

    def fail_all(self) -> None:
        """What still runs ends with an error, so that its clients are told; so does what is opened from now on."""
        self._abandoned = True
        for one in self._running.values():
            one.stream.end(Fail(Unavailable("this frontend has ended before the answer was complete")))

    @asynccontextmanager
    async def open(
        self,
        job: InferenceRequest,
        output: Output | ParsedOutput,
        deadline: float,
        reader: StreamSelector | None = None,
    ) -> AsyncIterator[Stream]:
        """Compute a request until `deadline`, on the loop's clock; leaving before its end cancels it. `reader`: of its
        stream and others. Raises Unavailable once this process gives up what runs."""
        if self._abandoned:
            raise Unavailable("this frontend is about to end")
        tries = RetryBudget(self.limits.attempts, self.limits.rescue_s)
        session = Session(
            job.id,
            job.sampling.max_tokens,
            tries,
            embedding_bytes=4 * job.embedding_size,
            held_by=job.grammar_param,
            wait_s=0.0 if job.is_follower else self.limits.wait_s,
        )
        stream = Stream(job, session, output, reader)
        loop = asyncio.get_running_loop()
        one = Running(stream, loop.time(), deadline)
        one.timer = loop.call_at(one.deadline, self._feed, one, Expired())
        self._running[job.id] = one
        if not job.repeats_prompt:
            self._metrics.input_tokens.observe(job.prompt_tokens)
        try:
            self._do(one, stream.session.start())
            yield stream
        finally:
            self._cancel_latency.client_gone(stream.session, loop.time())
            self._feed(one, ClientGone())
            self._close(one)

    # --- events in

    def _feed(self, one: Running, event: Event) -> None:
        one.last_sign = asyncio.get_running_loop().time()
        self._do(one, one.stream.session.on(event))

    async def _on_frame(self, message: Message) -> None:
        frame = STEP_FRAME.decode(message.payload)
        if not self._watchdog.is_due(frame):
            return
        try:
            for start in range(0, len(frame.parts), PARTS_PER_TURN):
                if start:
                    await asyncio.sleep(0)  # frames wait for one another, but nothing else waits for a whole frame
                self._apply(frame.instance, frame.parts[start : start + PARTS_PER_TURN])
        finally:
            self._watchdog.frame_read()

    def _apply(self, instance: str, parts: Sequence[Part]) -> None:
        """Nearly all parts bring one token to a stream that has had some; they touch it once, and nothing wakes up."""
        now = asyncio.get_running_loop().time()
        gaps_s: list[float] = []
        for part in parts:
            one = self._running.get(part.request)
            if one is None:
                self._on_stray(instance, part, now)
            elif (token := one.stream.session.next_token(instance, part)) < 0:
                self._feed(one, PartReceived(instance, part))
            else:
                assert one.last_tokens is not None, "a stream that continues has had tokens"
                gaps_s.append(now - one.last_tokens)
                one.last_sign = one.last_tokens = now
                if one.stream.add_tokens((token,), None):
                    self._feed(one, StopFound())
        self._metrics.inter_token.observe_all(gaps_s)

    def _on_stray(self, instance: str, part: Part, now: float) -> None:
        """The request is over here."""
        if part.finish is None:
            self._metrics.stray_parts.inc()
            self._cancel(instance, Cancel(part.request, part.attempt))
        else:
            self._cancel_latency.attempt_ended(part.request, part.attempt, now)

    def _on_dropped(self, _count: int) -> None:
        self._metrics.dropped_frames.inc()
        self._limited_log.warn("step frames come faster than they are read", "frames are lost")

    # --- actions out

    def _do(self, one: Running, actions: Sequence[Action]) -> None:
        tasks = self._runtime.tasks
        for action in actions:
            match action:
                case EmitTokens():
                    self._emit_tokens(one, action)
                case SelectWorker():
                    tasks.create_task(self._calls.select_worker(one, action), name=f"select {one.stream.request.id}")
                case RetryLater():
                    tasks.create_task(self._retry_later(one, action), name=f"wait {one.stream.request.id}")
                case DispatchAttempt():
                    if action.attempt > 1:
                        self._metrics.migrations.inc()
                    tasks.create_task(self._calls.dispatch(one, action), name=f"generate {one.stream.request.id}")
                case WithdrawAttempt():
                    self._cancel(action.instance, Cancel(one.stream.request.id, action.attempt))
                case CountLoss():
                    self._count_loss(one, action)
                case PublishLoad():
                    self._publish_load(one, action.event)
                case Finish() | Fail():
                    one.stream.end(action)
                    self._close(one)
                case _:
                    assert_never(action)

    async def _retry_later(self, one: Running, later: RetryLater) -> None:
        """With jitter: a worker that goes leaves many who wait."""
        await asyncio.sleep(later.pause_s * self._runtime.draw.uniform(0.5, 1.0))
        self._feed(one, RetryDue(later.attempt, asyncio.get_running_loop().time()))

    def _count_loss(self, one: Running, note: CountLoss) -> None:
        self._metrics.lost.labels(note.loss).inc()
        if note.had_tokens:
            one.waiting_since = asyncio.get_running_loop().time()

    def _cancel(self, worker: str, attempt: Cancel) -> None:
        """While NATS is away it is dropped: a worker that streams on is cancelled again by its own parts."""
        self._metrics.cancellations.inc()
        self._outbox.post(subjects.worker(self._runtime.namespace, worker, "cancel"), CANCEL.encode(attempt))

    def _publish_load(self, one: Running, event: LoadEvent) -> None:
        if isinstance(event, Prefilled):
            cached = CachedTokensByTier.of(event.cached_tokens, event.cached_host_tokens, event.cached_disk_tokens)
            self._metrics.cached_tokens.labels("device").inc(cached.device)
            self._metrics.cached_tokens.labels("host").inc(cached.host)
            self._metrics.cached_tokens.labels("disk").inc(cached.disk)
            if one.last_tokens is None:  # else the client has had its first token from an attempt before this one
                first_token_s = asyncio.get_running_loop().time() - one.started
                event = msgspec.structs.replace(event, first_token_s=first_token_s)
        self._outbox.publish_load(one.stream.request.model, event)

    def _emit_tokens(self, one: Running, action: EmitTokens) -> None:
        now = asyncio.get_running_loop().time()
        if one.last_tokens is None:
            self._metrics.first_token.observe(now - one.started)
        else:
            self._metrics.inter_token.observe((now - one.last_tokens) / len(action.tokens))
        one.last_tokens = now
        if one.stream.add_tokens(action.tokens, action.logprobs):
            self._feed(one, StopFound())

    def _close(self, one: Running) -> None:
        """The session has ended: forget it. Idempotent."""
        if self._running.get(one.stream.request.id) is not one:
            return
        del self._running[one.stream.request.id]
        assert one.timer is not None
        one.timer.cancel()
        if not one.stream.request.embedding_size:
            self._metrics.output_tokens.observe(len(one.stream.session.tokens))
