"""EngineLoop: commands in, one step, reports out. It sleeps while there is nothing to do: until a command comes, a copy
ends, or a time has come."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.engine.channel import EngineEnd
from services.worker.engine.core import EngineCore
from services.worker.messages import Shutdown
from services.worker.runner import Runner

MEMORY_INTERVAL_S = 1.0
"""Seconds between two reports of the device's memory while steps are computed."""


class EngineLoop:
    """Drives a core with a runner and a clock."""

    def __init__(self, channel: EngineEnd, core: EngineCore, runner: Runner, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._core = core
        self._runner = runner
        self._clock = clock
        self._memory_due_s = 0.0
        """When the device's memory is reported next."""
        self._idle = False
        """There was nothing to do in the last round."""

    def run(self) -> None:
        """Run until Shutdown. Raise what the runner raises."""
        self._channel.send(self._core.opening())
        self._report_memory()
        while self._handle_commands():
            self._step()

    def _handle_commands(self) -> bool:
        """Handle the commands that have come. Return False where Shutdown was among them."""
        for command in self._channel.receive(self._limit_s()):
            if isinstance(command, Shutdown):
                return False
            for answer in self._core.handle(command, self._clock()):
                self._channel.send(answer)
            self._operate()
        return True

    def _operate(self) -> None:
        """Have the runner do the operation that is due."""
        due = self._core.due_operation()
        if due is not None:
            failed = self._runner.operate(due.operation, due.name, due.path, due.level)
            for report in self._core.operated(failed, self._clock()):
                self._channel.send(report)
            self._report_memory()

    def _limit_s(self) -> float | None:
        """Return how long to wait for commands."""
        if not self._idle:
            return 0.0
        until_s = self._core.wait_until_s
        return None if until_s is None else max(0.0, until_s - self._clock())

    def _step(self) -> None:
        now_s = self._clock()
        reports, works = self._core.begin(now_s)
        for report in (*reports, *self._core.step_connector(now_s)):
            self._channel.send(report)
        self._idle = works is None and not self._core.busy
        if works is not None:
            begun_s = self._clock()
            drawn = self._runner.step(works) if works else []
            ended_s = self._clock()
            for report in self._core.finish(drawn, ended_s - begun_s):
                self._channel.send(report)
            if ended_s >= self._memory_due_s:
                self._report_memory()
        self._operate()

    def _report_memory(self) -> None:
        self._memory_due_s = self._clock() + MEMORY_INTERVAL_S
        use = self._runner.memory_use()
        if use is not None:
            self._channel.send(use)
