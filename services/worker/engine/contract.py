"""Engine: an engine as the worker's shell sees it, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.worker.contracts.messages import EngineOrder, EngineReport, Prefetch, Submit, TakeOver


class Engine(Protocol):
    """One engine: in a process of its own (EngineProcess), or in this process (LocalEngine, the tests'
    SimulatedEngine)."""

    @property
    def pid(self) -> int:
        """Id of the process that the engine runs in."""
        ...

    def submit(self, command: Submit | Prefetch) -> bool:
        """Send an attempt. Return False if the engine does not read, and nothing was sent."""
        ...

    def send(self, command: EngineOrder | TakeOver) -> None:
        """Send any other command."""
        ...

    async def receive(self) -> EngineReport:
        """Return the next report. Raise ChannelClosed."""
        ...

    def kill(self) -> None:
        """End the engine at once; `receive` will raise ChannelClosed."""
        ...

    async def end(self, limit_s: float, last: Callable[[EngineReport], None], /) -> int:
        """Shut the engine down, and kill it after `limit_s`; return the exit status. `last` gets each report that still
        comes."""
        ...
