"""Standby: keeps one engine next to the one that serves, with all but KV, which takes over when that one ends.

              StandingBy
    starting ───────────▶ ready
      ▲  │                  │
      │  └── it ended ◀─────┤        after a back-off, as that of engines
      │                     │
    none ◀───── end ────────┤        while the worker sleeps, and at its end
      ▲                     ▼
      └──────────────── taken        also while it starts: then it goes on loading, as the engine

Nothing that becomes of it reaches the engine that serves: a start that fails is logged, and tried again.
docs/decisions/0085 says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from services.worker.contracts.messages import Failed, Loading, StandingBy, TakeOver
from services.worker.engine.back_off import BackOff
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.contract import Engine
from shared.errors import HeadraceError, ProtocolError

AFTER_S = 1.0
"""Seconds for which an engine serves before a standby is started: requests that waited for it go first."""

_log = logging.getLogger(__name__)


class Standby:
    """At most one engine stands by. All methods run in the loop's thread."""

    def __init__(self, start: Callable[[], Awaitable[Engine]]) -> None:
        """`start` starts an engine that stands by."""
        self._start = start
        self._engine: Engine | None = None
        self._heard: Loading | StandingBy | None = None
        """What the engine that stands by has reported last."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process that stands by, or starts to. None if there is none."""
        return None if self._engine is None else self._engine.pid

    @property
    def ready(self) -> StandingBy | None:
        """What the engine said when it was ready to take over. None while there is none that is."""
        return self._heard if isinstance(self._heard, StandingBy) else None

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that the ready one shares with no other process. 0 if none is ready, or it is not known."""
        return self.ready.own_bytes if self.ready is not None else 0

    def keep(self, after_s: float = AFTER_S) -> None:
        """After `after_s` seconds, keep an engine that stands by, until it is taken or `end` is called. Idempotent."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(after_s), name="standby")

    def take(self, instance: str) -> tuple[Engine, Loading | StandingBy | None] | None:
        """Have the engine that stands by take over for a worker. Return it, which is the caller's now, and what it has
        reported last. None if there is none; afterwards none is kept."""
        engine, heard = self._engine, self._heard
        self._engine, self._heard = None, None
        self._stop()
        if engine is None:
            return None
        engine.send(TakeOver(instance))
        return engine, heard

    async def end(self) -> None:
        """Keep none any longer. The engine has ended when this returns."""
        if (keeping := self._stop()) is not None:
            await asyncio.gather(keeping, return_exceptions=True)

    def _stop(self) -> asyncio.Task[None] | None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
        return keeping

    async def _keep(self, after_s: float) -> None:
        loop, back_off = asyncio.get_running_loop(), BackOff()
        delay_s = after_s
        while True:
            await asyncio.sleep(delay_s)
            began_s = loop.time()
            try:
                failed = await self._live()
            except (OSError, HeadraceError) as wrong:  # it could not be started
                failed = Failed(reason=str(wrong))
            delay_s = back_off.after(loop.time() - began_s)
            _log.error("the standby is lost (%s); starting another in %g s", failed.reason, delay_s)

    async def _live(self) -> Failed:
        """Run one standby until it ends; return why."""
        engine = await started(self._start())
        self._engine, self._heard = engine, None
        _log.info("a standby started, process %d", engine.pid)
        try:
            return await self._follow(engine)
        finally:
            if self._engine is engine:  # it was not taken
                self._engine, self._heard = None, None
                engine.kill()  # at once: `end` may be cancelled
                await engine.end(0.0, lambda _: None)

    async def _follow(self, engine: Engine) -> Failed:
        while True:
            try:
                report = await engine.receive()
            except (ChannelClosed, ProtocolError) as wrong:
                return Failed(reason=str(wrong))
            match report:
                case Loading() | StandingBy():
                    self._heard = report
                case Failed():
                    return report
                case _:
                    return Failed(reason=f"it reported {type(report).__name__} without being asked to take over")


async def started(starting: Awaitable[Engine]) -> Engine:
    """Return an engine when it has started. If this is cancelled meanwhile, the engine has ended."""
    engine = asyncio.ensure_future(starting)
    try:
        return await asyncio.shield(engine)
    except asyncio.CancelledError:
        with suppress(OSError, HeadraceError):  # it did not start
            await (await engine).end(0.0, lambda _: None)
        raise
