"""Looks after running requests whose workers went quiet, or are gone.

load reports, Ping, lost instances ─▶ Lost, InstanceGone

So that a lost last part, a frozen engine or a dead worker ends no request's progress until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from services.frontend.config import LimitsConfig
from services.frontend.pulses import Pulses
from services.frontend.questions import Feed
from services.frontend.running import Running
from services.frontend.sessions import InstanceGone, Lost, State
from shared import subjects
from shared.directory import DirectoryChange, InstanceDown
from shared.errors import NoResponders, Unavailable
from shared.lifecycle import Runtime
from shared.messages import LOAD_REPORT, PING, Ping
from shared.messaging import Message

_log = logging.getLogger(__name__)


class Watch:
    """Over all requests of `running`; `feed` gets what becomes of them."""

    def __init__(self, runtime: Runtime, limits: LimitsConfig, running: Mapping[str, Running], feed: Feed) -> None:
        self._runtime = runtime
        self._limits = limits
        self._running = running
        self._feed = feed
        self._pulses = Pulses(quiet_s=limits.quiet_s, frozen_s=limits.frozen_s)

    async def start(self) -> None:
        """Listen for load reports and lost instances."""
        runtime = self._runtime
        await runtime.bus.subscribe(subjects.worker(runtime.namespace, "*", "load"), self._on_report)
        runtime.directory.subscribe(self._on_change)
        runtime.tasks.create_task(self._look(), name="look after the quiet")

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

    async def _look(self) -> None:
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
