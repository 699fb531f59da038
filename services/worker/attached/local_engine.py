"""LocalEngine: runs the attached engine as a task of the worker's own process.

    shell ── submit, send ──▶ LocalChannel ──▶ AsyncEnd: an eventfd says that there are commands
    shell ◀── receive ◀────── LocalChannel ◀── reports, as they are: nothing is encoded

    starting ──▶ serving ──Shutdown──▶ ended        an exception, `kill`: ended at once

Other engines have a process of their own, since arithmetic would stop the loop that answers, and a crash of CUDA or of
vLLM, or the memory of a lost engine, must not be the shell's. None of this holds here, because the server computes. A
process would cost 50 MB a server and, for each step, an encoded report and two wake-ups. The price of having none: a
worker's streams share a core with its frames, and what ends the process ends the worker with the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from services.worker.attached.engine import run_attached
from services.worker.attached.text_engine import run_text
from services.worker.config import EngineConfig, WorkerConfig
from services.worker.contracts.messages import (
    EngineCommand,
    EngineOrder,
    EngineReport,
    Failed,
    Loading,
    Prefetch,
    Shutdown,
    Submit,
    TakeOver,
)
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.one_line import one_line
from services.worker.model_facts import find_facts
from shared.errors import ModelError

MOST_COMMANDS = 4096
"""Most commands that the engine has not read; then no attempt is taken."""
MOST_REPORTS = 1024
"""Most reports that the shell has not read; one more ends the engine."""
END_LIMIT_S = 5.0
"""Seconds that a cancelled engine may take to close its connections."""

_log = logging.getLogger(__name__)


class LocalChannel:
    """Both ends of the channel in one loop: `send` and `receive` are the engine's, as those of an EngineEnd."""

    def __init__(self) -> None:
        self._commands: list[EngineCommand] = []
        self._reports: deque[EngineReport] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._heard = asyncio.Event()
        self._closed = ""
        """Why no report comes any more. Empty while some may."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are commands."""
        return self._wake

    def send(self, report: EngineReport) -> None:
        """Send a report. Raise ChannelClosed if the shell does not read."""
        if len(self._reports) >= MOST_REPORTS:
            raise ChannelClosed(f"the shell has {MOST_REPORTS} reports unread")
        self._reports.append(report)
        self._heard.set()

    def receive(self, _limit_s: float | None = 0.0) -> list[EngineCommand]:
        """Return all commands that have come, without waiting."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        commands, self._commands = self._commands, []
        return commands

    @property
    def full(self) -> bool:
        """True while the engine has left too much unread."""
        return len(self._commands) >= MOST_COMMANDS

    def order(self, command: EngineCommand) -> None:
        """Send a command to the engine, unless it has ended."""
        if not self._closed:
            self._commands.append(command)
            os.eventfd_write(self._wake, 1)

    async def report(self) -> EngineReport:
        """Return the next report; one receiver at a time. Raise ChannelClosed."""
        while not self._reports:
            if self._closed:
                raise ChannelClosed(self._closed)
            self._heard.clear()
            await self._heard.wait()
        return self._reports.popleft()

    def close(self, reason: str) -> None:
        """End the channel; reports that have come can still be had."""
        if not self._closed:
            self._closed = reason
            os.close(self._wake)
            self._heard.set()


class LocalEngine:
    """One attached engine, and the channel to it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._channel = LocalChannel()
        self._task = asyncio.create_task(_serve(config, self._channel), name="attached engine")
        self._task.add_done_callback(self._ended)

    @staticmethod
    async def start(config: WorkerConfig, model_name: str, instance: str) -> LocalEngine:
        """Return an engine that begins; it reports Loading and Ready by itself."""
        return LocalEngine(EngineConfig.of(config, model_name, instance, parent_pid=os.getpid()))

    @property
    def pid(self) -> int:
        return os.getpid()

    def submit(self, command: Submit | Prefetch) -> bool:
        """Send an attempt. Return False if nothing was sent: the engine does not read, or its server takes text."""
        if self._channel.full or self._config.worker.attached.kind == "text":
            return False
        self._channel.order(command)
        return True

    def send(self, command: EngineOrder | TakeOver) -> None:
        """Send a command; there is at most one for each submitted attempt and each request."""
        self._channel.order(command)

    async def receive(self) -> EngineReport:
        """Return the next report. Raise ChannelClosed."""
        return await self._channel.report()

    def kill(self) -> None:
        """End the engine at once; `receive` will raise ChannelClosed."""
        self._task.cancel()

    async def end(self, limit_s: float, last: Callable[[EngineReport], None]) -> int:
        """Send Shutdown, and cancel the engine after `limit_s`; return 0, or 1 if it failed. `last` gets the reports
        that come meanwhile."""
        self._channel.order(Shutdown())
        with suppress(TimeoutError, ChannelClosed):
            async with asyncio.timeout(limit_s):
                while True:
                    last(await self.receive())
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=END_LIMIT_S)
        if not self._task.done():
            _log.error("the attached engine did not end in %g s", END_LIMIT_S)
        return int(not self._task.done() or self._task.cancelled() or self._task.exception() is not None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            _log.error("the attached engine failed", exc_info=failed)
        self._channel.close("the engine has ended" if failed is None else f"the engine failed: {one_line(failed)}")


async def _serve(config: EngineConfig, channel: LocalChannel) -> None:
    """Run the engine until Shutdown, or report why it ends."""
    loop = asyncio.get_running_loop()

    if config.worker.attached.kind == "text":
        with suppress(ChannelClosed):
            if (failed := await run_text(config, channel)) is not None:
                channel.send(failed)
        return

    def report(loading: Loading) -> None:
        loop.call_soon_threadsafe(channel.send, loading)

    with suppress(ChannelClosed):
        try:
            local = await asyncio.to_thread(find_facts, config.worker, report)
            failed = await run_attached(config, channel, local)
        except ModelError as wrong:
            failed = Failed(reason=str(wrong), model=True)
        if failed is not None:
            channel.send(failed)
