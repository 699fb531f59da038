"""An engine as the worker's shell sees it, wherever it runs: in a process of its own, or simulated in this one."""

from __future__ import annotations

from typing import Protocol

from services.worker.messages import (
    CancelAttempt,
    EngineReport,
    KvbmDown,
    KvbmReply,
    KvbmUp,
    Submit,
    TakeEngineSnapshot,
)


class Engine(Protocol):
    """One engine: a process of its own (EngineClient), or simulated in this one (SimulatedEngine)."""

    @property
    def pid(self) -> int:
        """Of the process it runs in."""
        ...

    def submit(self, command: Submit) -> bool:
        """False: the engine does not read, and nothing was sent."""
        ...

    def send(self, command: CancelAttempt | TakeEngineSnapshot | KvbmUp | KvbmDown | KvbmReply) -> None: ...

    async def receive(self) -> EngineReport:
        """The next report. Raises PeerGone."""
        ...

    def kill(self) -> None:
        """It ends at once; `receive` will say so."""
        ...

    async def end(self, limit_s: float, /) -> int:
        """Shutdown, and after `limit_s` a kill; returns the exit status."""
        ...
