"""The engine's loop: commands in, one step, reports out. It blocks while there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.worker.core import EngineCore
from services.worker.engine import EngineCommand, EngineReport, Runner, Shutdown


class Channel(Protocol):
    """What the loop needs of its end of the channel."""

    def send(self, report: EngineReport) -> None: ...

    def receive(self, *, wait: bool) -> Sequence[EngineCommand]: ...


class EngineLoop:
    """Drives a core with a runner and a clock."""

    def __init__(self, channel: Channel, core: EngineCore, runner: Runner, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._core = core
        self._runner = runner
        self._clock = clock

    def run(self) -> None:
        """Returns on Shutdown. Whatever the runner raises comes out of here."""
        self._channel.send(self._core.opening())
        while self._obey():
            self._step()

    def _obey(self) -> bool:
        """Takes the commands that have come; False: the last one was Shutdown."""
        for command in self._channel.receive(wait=not self._core.busy):
            if isinstance(command, Shutdown):
                return False
            for answer in self._core.obey(command, self._clock()):
                self._channel.send(answer)
        return True

    def _step(self) -> None:
        told, works = self._core.begin(self._clock())
        for report in told:
            self._channel.send(report)
        if works is not None:
            begun_s = self._clock()
            drawn = self._runner.step(works) if works else []
            for report in self._core.finish(drawn, self._clock() - begun_s):
                self._channel.send(report)
