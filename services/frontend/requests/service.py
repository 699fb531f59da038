"""Runs the sessions of all requests: carries out their actions on the bus and brings back the events.

SelectWorker, DispatchAttempt  ─▶ requests/calls.py ─▶ the answers of routers and workers
WithdrawAttempt, PublishLoad   ─▶ the outbox
EmitTokens, Finish, Fail       ─▶ the request's Stream
step frames, deadlines, clients that leave ─▶ events; silent attempts and lost instances: requests/watchdog.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import assert_never

import msgspec
from prometheus_client import Histogram

from services.frontend.auth.accounts import NO_TOKENS, Account, TokenUse
from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics, ModelMetrics
from services.frontend.protocol.chat_chunks import CachedTokensByTier
from services.frontend.requests import actions, events
from services.frontend.requests.admission import Admission, Permit
from services.frontend.requests.attempt_spans import AttemptSpans
from services.frontend.requests.calls import BusCalls
from services.frontend.requests.retry import RetryBudget
from services.frontend.requests.session import Session
from services.frontend.requests.stream import InferenceRequest, Stream, StreamSelector
from services.frontend.requests.watchdog import Watchdog
from services.frontend.requests.way import WayLog, session_counts
from shared import subjects
from shared.bus.contract import Message
from shared.bus.outbox import Outbox
from shared.discovery.directory import CardUp, DirectoryChange
from shared.errors import HeadraceError, RateLimited, Unavailable
from shared.messages.frames import STEP_FRAME, Part
from shared.messages.frontends import RecentRequests
from shared.messages.generate import CANCEL, Cancel
from shared.messages.select import LoadEvent, Prefilled, Selected, SelectRefused
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime

BATCH_S = 0.005
"""Seconds for which load events and Cancels are collected before they are sent together."""

PARTS_PER_TURN = 128
"""The number of parts of a frame that are applied before other tasks run: about a millisecond."""

CANCELS_LIMIT = 4096
"""The number of cancellations whose latency is measured at the same time; beyond it the oldest are forgotten."""


class RequestService:
    """All requests of this process."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics) -> None:
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self.limits = limits
        self._metrics = metrics
        self._outbox = Outbox(runtime.bus, runtime.namespace, runtime.registry, batch_s=BATCH_S)
        self._running: dict[str, Stream] = {}
        self._cancel_latency = CancelLatency(metrics.cancellation)
        self.calls = BusCalls(runtime, limits, metrics, self._feed)
        self._watchdog = Watchdog(runtime, limits, metrics, self._running, self._feed)
        self.admission = Admission(limits, lambda bound: metrics.rejections.labels(bound).inc())
        metrics.inflight.set_function(lambda: len(self.admission.permits))
        self.ways: WayLog | None = None
        """Where the ways of requests are kept for the page. None if there is no page."""
        self._limited_log = RateLimitedLog()
        self._pausing: dict[asyncio.Future[None], str] = {}
        """What the requests wait for that will ask routers again, and their models."""
        self._failing_all = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Listen for step frames, load reports and lost instances."""
        runtime = self._runtime
        subject = subjects.stream(runtime.namespace, runtime.instance)
        await runtime.bus.subscribe(subject, self._on_frame, dropped=self._on_dropped)
        runtime.directory.subscribe(self._on_change)
        await self._watchdog.start()
        runtime.tasks.create_task(self._outbox.run(), name="outbox")

    @contextmanager
    def reserve(self, account: Account | None = None) -> Iterator[Permit]:
        """Let a request in whose body is still on its way. `account` is that of its API key, if keys are required.

        Raise Overloaded or RateLimited at a bound, and Unavailable once this process is about to end.
        """
        permit = self.admission.reserve(account)
        if account is not None:
            try:
                account.begin_request(self._now())
            except RateLimited:
                self.admission.release(permit)
                raise
        self._idle.clear()
        try:
            yield permit
        except (HeadraceError, asyncio.CancelledError):
            if permit.spent is NO_TOKENS:  # it was not charged before its tokens were made
                permit.spent = TokenUse(refused=permit.made)
            raise
        finally:
            self.admission.release(permit)
            if account is not None:
                account.end_request(permit.spent, self._now())
            if not self.admission.permits:
                self._idle.set()

    @contextmanager
    def admit(self, body_bytes: int, account: Account | None = None) -> Iterator[Permit]:
        """Let a request in whose body is complete. Raise what `reserve` raises."""
        with self.reserve(account) as permit:
            permit.add_bytes(body_bytes)
            permit.admit()
            yield permit

    def recent(self) -> RecentRequests:
        """Return the latest requests, for the page; there must be one."""
        assert self.ways is not None, "without a page, ways are not kept"
        arriving = sum(permit.tokenising or not permit.admitted for permit in self.admission.permits)
        now = self._now()
        return self.ways.report(self._runtime.instance, arriving, len(self._running), now)

    def publish_load(self, model: str, event: LoadEvent) -> None:
        """Publish a load event of a request that has no stream here."""
        self._outbox.publish_load(model, event)

    async def wait_idle(self) -> None:
        """Wait until no request is running and the outbox is empty, or NATS is away."""
        await self._idle.wait()
        await self._outbox.flush()

    def fail_all(self) -> None:
        """End every running request with an error, so that its client learns of it, and refuse new ones."""
        self._failing_all = True
        for stream in self._running.values():
            stream.end(actions.Fail(Unavailable("this frontend has ended before the answer was complete")))

    @contextmanager
    def open(self, request: InferenceRequest, selector: StreamSelector | None = None) -> Iterator[Stream]:
        """Compute a request; leaving the context before its end cancels it. `selector` waits for several streams.

        Raise Unavailable after `fail_all`.
        """
        if self._failing_all:
            raise Unavailable("this frontend is about to end")
        session = Session(
            request.id,
            request.sampling.max_tokens,
            RetryBudget(self.limits.attempts, self.limits.rescue_s),
            embedding_bytes=4 * request.embedding_size,
            grammar_param=request.grammar_param,
            wait_s=0.0 if request.waits else self.limits.wait_s,
            prompt_logprobs=0 if request.prompt_entries is None else request.prompt_tokens - 1,
            makes_picture=request.picture is not None,
        )
        metrics = self._metrics.of_model(request.model)
        stream = Stream(request, session, metrics, selector, started=self._now())
        stream.timer = self._loop.call_at(request.deadline, self._feed, stream, events.TimeExpired())
        self._running[request.id] = stream
        if self.ways is not None and not request.is_follower:
            begun = (request.id, request.model, request.prompt_tokens, partial(session_counts, session))
            stream.way = self.ways.begin(*begun, request.received_s, stream.started)
        if not request.repeats_prompt:
            metrics.input_tokens.observe(request.prompt_tokens)
            metrics.prompt_count.inc(request.prompt_tokens)
        try:
            self._do(stream, session.start())
            yield stream
        finally:
            self._cancel_latency.client_gone(session, self._now())
            self._feed(stream, events.ClientLeft())
            self._close(stream)

    # --- events in

    def _feed(self, stream: Stream, event: events.Event) -> None:
        stream.last_sign = self._now()
        if stream.spans is not None:
            self._trace_choice(stream, stream.spans, event)
        self._do(stream, stream.session.on(event))
        if stream.way is not None:
            stream.way.note(stream.session, stream.last_sign)

    def _trace_choice(self, stream: Stream, spans: AttemptSpans, event: events.Event) -> None:
        """Pass the answer to a Select on to the spans of a traced request."""
        assert stream.request.trace is not None
        if isinstance(event, Selected | SelectRefused | events.Unrouted) and stream.session.is_choosing(event.attempt):
            now_ns = stream.request.trace.now_ns()
            if isinstance(event, events.Unrouted):
                spans.unrouted(event.reason, now_ns)
            else:
                instance = event.instance if isinstance(event, Selected) else ""
                card = self._runtime.directory.cards.get((stream.request.model, instance))
                spans.chosen(event, 0 if card is None else card.block_size, now_ns)

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
        """Apply the parts of a step frame. Nearly all bring one token to a stream that has had some: such a part
        touches its stream once and wakes no task."""
        now = self._now()
        gaps_s: list[float] = []
        metrics: ModelMetrics | None = None
        for part in parts:
            stream = self._running.get(part.request)
            if stream is None:
                self._on_stray(instance, part, now)
            elif (token := stream.session.next_token(instance, part)) < 0:
                self._feed(stream, events.PartReceived(instance, part))
            else:
                assert stream.last_tokens is not None, "a stream that continues has had tokens"
                metrics = stream.metrics  # all streams of a frame have the worker's model
                gaps_s.append(now - stream.last_tokens)
                stream.last_sign = stream.last_tokens = now
                if stream.add_tokens((token,), None):
                    self._feed(stream, events.StopFound())
        if metrics is not None:
            metrics.inter_token.observe_all(gaps_s)
            metrics.output_count.inc(len(gaps_s))

    def _on_stray(self, instance: str, part: Part, now: float) -> None:
        """Handle a part of a request that is over."""
        if part.finish is None:
            self._metrics.stray_parts.inc()
            self._cancel(instance, Cancel(part.request, part.attempt))
        else:
            self._cancel_latency.attempt_ended(part.request, part.attempt, now)

    def _on_dropped(self, _count: int) -> None:
        self._metrics.dropped_frames.inc()
        self._limited_log.warn("step frames come faster than they are read", "frames are lost")

    # --- actions out

    def _do(self, stream: Stream, following: Sequence[actions.Action]) -> None:
        tasks, name, handed_over = self._runtime.tasks, stream.request.id, False
        for action in following:
            if stream.spans is not None and stream.request.trace is not None:
                stream.spans.acted(action, stream.request.trace.now_ns())
            match action:
                case actions.EmitTokens():
                    self._emit_tokens(stream, action)
                case actions.EmitPromptLogprobs() | actions.EmitStep():
                    self._emit_other(stream, action)
                case actions.SelectWorker():
                    tasks.create_task(self.calls.select_worker(stream, action), name=f"select {name}")
                case actions.RetryLater():
                    self._note(stream, action.attempt, actions.no_worker_note(action))
                    tasks.create_task(self._retry_later(stream, action), name=f"wait {name}")
                case actions.DispatchAttempt():
                    if action.attempt > 1 and not handed_over:
                        stream.metrics.migrations.inc()
                    stream.worker = action.instance
                    tasks.create_task(self.calls.dispatch(stream, action), name=f"generate {name}")
                case actions.AnnounceAttempt():
                    tasks.create_task(self.calls.announce(stream, action), name=f"announce {name}")
                case actions.HandOver():
                    handed_over = True
                    stream.waiting_since = self._now()
                    stream.metrics.hand_overs.inc()
                    self._note(stream, action.attempt, actions.hand_over_note(action))
                case actions.WithdrawAttempt():
                    self._cancel(action.instance, Cancel(name, action.attempt))
                case actions.CountLoss():
                    self._count_loss(stream, action)
                case actions.PublishLoad():
                    self._publish_load(stream, action.event)
                case actions.Finish() | actions.Fail():
                    stream.end(action)
                    self._close(stream)
                case _:
                    assert_never(action)

    async def _retry_later(self, stream: Stream, later: actions.RetryLater) -> None:
        """Wait until a worker of the model comes, at most for the pause, which has jitter, because a worker that goes
        leaves many requests that wait."""
        came: asyncio.Future[None] = self._loop.create_future()
        self._pausing[came] = stream.request.model
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(later.pause_s * self._runtime.draw.uniform(0.5, 1.0)):
                    await came
        finally:
            del self._pausing[came]
        self._feed(stream, events.RetryDue(later.attempt, self._now()))

    def _on_change(self, change: DirectoryChange) -> None:
        if isinstance(change, CardUp):
            for came, model in self._pausing.items():
                if model == change.card.model and not came.done():
                    came.set_result(None)

    def _note(self, stream: Stream, attempt: int, text: str) -> None:
        now = self._now()
        self._runtime.notes.requests.add(stream.request.id, text, now, attempt=attempt)

    def note_failure(self, request: str, error: HeadraceError) -> None:
        """Note, for `headrace explain`, that a request's client got an error."""
        self._runtime.notes.requests.add(request, actions.failure_note(error), self._now())

    def _count_loss(self, stream: Stream, action: actions.CountLoss) -> None:
        text = actions.loss_note(action, stream.worker, len(stream.session.tokens))
        self._note(stream, action.attempt, text)
        self._metrics.lost.labels(action.loss).inc()
        if action.had_tokens:
            stream.waiting_since = self._now()

    def _cancel(self, worker: str, attempt: Cancel) -> None:
        """Send Cancel. While NATS is away it is dropped; if the worker streams on, its next part leads to another."""
        self._metrics.cancellations.inc()
        self._outbox.post(subjects.worker(self._runtime.namespace, worker, "cancel"), CANCEL.encode(attempt))

    def _publish_load(self, stream: Stream, event: LoadEvent) -> None:
        if isinstance(event, Prefilled):
            cached = CachedTokensByTier.of(event.cached_tokens, event.cached_host_tokens, event.cached_disk_tokens)
            for counter, tokens in zip(stream.metrics.cached, (cached.device, cached.host, cached.disk), strict=True):
                if tokens:
                    counter.inc(tokens)
            if stream.last_tokens is None:  # else an earlier attempt brought the client its first token
                first_token_s = self._now() - stream.started
                event = msgspec.structs.replace(event, first_token_s=first_token_s)
                stream.first_tokens = time.monotonic()
        self._outbox.publish_load(stream.request.model, event)

    def _emit_tokens(self, stream: Stream, action: actions.EmitTokens) -> None:
        now = self._now()
        if stream.last_tokens is None:
            trace = stream.request.trace
            exemplar = None if trace is None else {"trace_id": trace.id}
            stream.metrics.first_token.observe(now - stream.started, exemplar)
            self._metrics.hops["first_token"].observe(now - stream.accepted)
            if stream.request.served is not None:
                stream.request.served.begun(now - (stream.request.received_s or stream.started))
        else:
            stream.metrics.inter_token.observe((now - stream.last_tokens) / len(action.tokens))
        stream.metrics.output_count.inc(len(action.tokens))
        stream.last_tokens = now
        if stream.add_tokens(action.tokens, action.logprobs):
            self._feed(stream, events.StopFound())

    def _emit_other(self, stream: Stream, action: actions.EmitPromptLogprobs | actions.EmitStep) -> None:
        if isinstance(action, actions.EmitPromptLogprobs):
            stream.add_prompt_logprobs(action.given)
        else:
            stream.waiting_since = self._now()  # `first_token_s` bounds the time until the next step
            stream.show_step(action)

    def _close(self, stream: Stream) -> None:
        """Forget a request whose session has ended. Idempotent."""
        if self._running.get(stream.request.id) is not stream:
            return
        del self._running[stream.request.id]
        if stream.way is not None:
            stream.way.note(stream.session, self._now())
            stream.way.end(stream.outcome, self._now())
        if stream.spans is not None and stream.request.trace is not None:
            stream.spans.close(stream.request.trace.now_ns(), "" if stream.ended else "the client has left")
        assert stream.timer is not None
        stream.timer.cancel()
        if not stream.request.embedding_size and stream.request.picture is None:
            stream.metrics.output_tokens.observe(len(stream.session.tokens))
        if stream.request.served is not None:
            session, request = stream.session, stream.request
            stream.request.served.add(
                prompt_tokens=0 if request.repeats_prompt else request.prompt_tokens,
                output_tokens=0 if request.embedding_size else len(session.tokens),
                cached_tokens=0 if request.repeats_prompt else session.cached_tokens,
                instance=stream.worker,
                attempts=session.attempt,
            )
        if stream.first_tokens is not None and stream.last_tokens is not None:
            self._metrics.hops["rest"].observe(time.monotonic() - stream.first_tokens)


class CancelLatency:
    """Measures how long cancellations take, until the worker reports that the attempt's blocks are free.

        client gone ──▶ (Cancel to the worker) ──▶ a part with a finish reason: observed

    A worker that dies, or that never had the attempt, sends no such part. Times are seconds on the loop's clock.
    """

    def __init__(self, seconds: Histogram) -> None:
        self._seconds = seconds
        self._began: dict[tuple[str, int], float] = {}

    def client_gone(self, session: Session, now: float) -> None:
        """Begin to measure, before the session hears that its client is gone. Ignored if no worker has the attempt."""
        if not session.instance:
            return
        if len(self._began) >= CANCELS_LIMIT:
            del self._began[next(iter(self._began))]
        self._began[session.request, session.attempt] = now

    def attempt_ended(self, request: str, attempt: int, now: float) -> None:
        """Observe the latency of an attempt that its worker has ended, if its client was gone."""
        began = self._began.pop((request, attempt), None)
        if began is not None:
            self._seconds.observe(now - began)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._began) <= CANCELS_LIMIT
