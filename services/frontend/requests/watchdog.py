"""Watches running requests: finds lost frames, silent or frozen workers, and requests without progress.

step frames           ─▶ requests/frames.py ─▶ due, or ResendRequest ─▶ AttemptLost
load reports, Ping    ─▶ requests/liveness.py ─▶ AttemptLost
lost instances        ─▶ InstanceGone
first_token_s, stall_s ─▶ TimeExpired, AttemptLost

Without it, a request whose frame is lost, or whose worker hangs, would wait until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import assert_never

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.calls import Feed
from services.frontend.requests.events import AttemptLost, Event, InstanceGone, TimeExpired
from services.frontend.requests.frames import EndsLost, Frames, RequestResend
from services.frontend.requests.liveness import Liveness
from services.frontend.requests.session import State
from services.frontend.requests.stream import Stream
from shared import subjects
from shared.bus.contract import Message
from shared.discovery.directory import DirectoryChange, InstanceDown
from shared.errors import NoResponders, ProtocolError, Unavailable
from shared.messages.control import PING, Ping
from shared.messages.frames import RESEND_REQUEST, RESENT, ResendRequest, StepFrame
from shared.messages.load import LOAD_REPORT
from shared.runtime.runtime import Runtime

_log = logging.getLogger(__name__)


class Watchdog:
    """Watches all requests of `running`; `feed` gets the events that it finds."""

    def __init__(
        self, runtime: Runtime, limits: LimitsConfig, metrics: Metrics, running: Mapping[str, Stream], feed: Feed
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._metrics = metrics
        self._running = running
        self._feed = feed
        self._liveness = Liveness(quiet_s=limits.quiet_s, frozen_s=limits.frozen_s)
        self._excused = 0.0
        """The time until which no message could arrive, so that silence up to then proves nothing."""
        self._frames = Frames(retry_s=limits.quiet_s / 2, late_s=limits.quiet_s)

    async def start(self) -> None:
        """Listen for load reports and lost instances."""
        runtime = self._runtime
        await runtime.bus.subscribe(subjects.worker(runtime.namespace, "*", "load"), self._on_report)
        runtime.directory.subscribe(self._on_change)
        runtime.tasks.create_task(self._check_requests(), name="watch requests")

    def is_due(self, frame: StepFrame) -> bool:
        """Return whether the frame is its worker's next one, which the caller then reads up to `frame_read`. If a frame
        is missing, ask for it."""
        now = asyncio.get_running_loop().time()
        verdict = self._frames.frame_received(frame.instance, frame.epoch, frame.sequence, now)
        if verdict == "due":
            self._frames.reading = frame.instance
            return True
        self._metrics.frames_out_of_turn.labels(verdict).inc()
        if verdict == "ahead":
            self._do(self._frames.next_actions(frame.instance, now))
        return False

    def frame_read(self) -> None:
        """Record that all parts of the frame that was due are applied."""
        self._frames.reading = ""

    def _do(self, actions: Sequence[RequestResend | EndsLost]) -> None:
        for action in actions:
            match action:
                case RequestResend():
                    self._runtime.tasks.create_task(self._request_resend(action), name=f"resend {action.instance}")
                case EndsLost():
                    for request, attempt in action.attempts:
                        stream = self._running.get(request)
                        if stream is not None and stream.session.instance == action.instance:
                            self._feed(stream, AttemptLost(attempt, "unheard", "the end of its stream was lost"))
                case _:
                    assert_never(action)

    async def _request_resend(self, ask: RequestResend) -> None:
        """Ask a worker to send step frames again that did not come."""
        streaming = [
            (stream.session.request, stream.session.attempt)
            for stream in self._running.values()
            if stream.session.instance == ask.instance and stream.session.state is State.STREAMING
        ]
        question = RESEND_REQUEST.encode(ResendRequest(self._runtime.instance, ask.first))
        subject = subjects.worker(self._runtime.namespace, ask.instance, "resend")
        try:
            reply = await self._runtime.bus.request(subject, question, timeout_s=self._limits.quiet_s / 2)
            resent = RESENT.decode(reply.payload)
        except (Unavailable, ProtocolError) as why:
            self._metrics.resends.labels("unanswered").inc()
            _log.warning("worker %s did not resend the missing frames: %s", ask.instance, why)
            return
        self._metrics.resends.labels("resent" if resent.first <= ask.first else "too_old").inc()
        self._frames.resend_answered(ask, resent, streaming)
        self._do(self._frames.next_actions(ask.instance, asyncio.get_running_loop().time()))

    def _on_change(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceDown):
            self._liveness.forget(change.instance.instance)
            self._gone(change.instance.instance)

    def _gone(self, instance: str) -> None:
        for stream in list(self._running.values()):
            if stream.session.instance == instance:
                self._feed(stream, InstanceGone(instance))

    async def _on_report(self, message: Message) -> None:
        report = LOAD_REPORT.decode(message.payload)
        if report.instance in self._runtime.directory.instances:
            now = asyncio.get_running_loop().time()
            self._liveness.report_received(report, now)
            self._frames.report_received(report.instance, report.frames.get(self._runtime.instance, -1), now)

    async def _check_requests(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            slept_from = loop.time()
            await asyncio.sleep(self._limits.quiet_s / 2)
            stopped = (
                loop.time() - slept_from > self._limits.quiet_s
            )  # this process itself stood still, by a signal or a long task
            if stopped or not self._runtime.bus.connected:
                self._excused = loop.time()
                self._liveness.excuse_silence(self._excused)
            silent: dict[str, None] = {}
            for stream in list(self._running.values()):
                overdue = self._overdue(stream, loop.time())
                if overdue is not None:
                    self._feed(stream, overdue)
                session = stream.session
                if session.state is not State.STREAMING:
                    continue
                attempt = (session.request, session.attempt)
                match self._liveness.judge(session.instance, attempt, stream.last_sign, loop.time()):
                    case "alive":
                        pass
                    case "silent":
                        silent[session.instance] = None
                    case "ended":
                        self._frames.suspect(session.instance, attempt)
                    case "frozen":
                        self._feed(stream, AttemptLost(session.attempt, "frozen", "the worker makes no progress"))
            if self._runtime.bus.connected:
                self._do(self._frames.poll(loop.time()))
            await asyncio.gather(*map(self._ping_silent, silent))

    def _overdue(self, stream: Stream, now: float) -> Event | None:
        """Return the event for a request whose next token is overdue; None if there is still time."""
        session, limits = stream.session, self._limits
        if not session.prefilled and stream.request.is_patient:
            return None
        if not session.prefilled:
            return TimeExpired("first_token") if now - stream.waiting_since >= limits.first_token_s else None
        assert stream.last_tokens is not None, "a prefilled attempt has brought tokens"
        if now - max(stream.last_tokens, self._excused) < limits.stall_s:
            return None
        return AttemptLost(session.attempt, "stalled", f"no token came for {limits.stall_s:g} s")

    async def _ping_silent(self, worker: str) -> None:
        """Ping a silent worker. Without a subscriber it is dead, whatever its lease says; a slow one has `frozen_s`."""
        subject = subjects.control(self._runtime.namespace, "worker", worker)
        try:
            await self._runtime.bus.request(subject, PING.encode(Ping()), timeout_s=self._limits.quiet_s)
        except NoResponders:
            _log.warning("worker %s is gone: it no longer listens on NATS", worker)
            self._gone(worker)
        except Unavailable as why:
            _log.warning("worker %s is silent: %s", worker, why)

    def validate(self) -> None:
        """Assert the invariants."""
        self._frames.validate()
