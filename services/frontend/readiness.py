"""Would a request be served now? Known at any time without asking anybody, so that a flood cannot make it flap.

Routers are pinged every PING_EVERY_S, and at once when one appears. They are unready after FAILURES rounds without any
answer: a busy fleet answers late now and then.
"""

from __future__ import annotations

import asyncio

from services.frontend.models.registry import ModelRegistry
from shared import subjects
from shared.discovery.directory import DirectoryChange, InstanceUp
from shared.errors import Unavailable
from shared.messages import PING, Ping
from shared.runtime.lifecycle import Runtime

PING_EVERY_S = 1.0
PING_TIMEOUT_S = 1.0
FAILURES = 3
PINGED = 3
"""Routers a round, drawn anew each time."""


class Readiness:
    """Of one frontend."""

    def __init__(self, runtime: Runtime, models: ModelRegistry) -> None:
        self._runtime = runtime
        self._models = models
        self._failures = FAILURES
        """In a row; none has answered yet."""
        self._appeared = asyncio.Event()

    def start(self) -> None:
        """Ask routers, and answer for this process's health, from now on."""
        self._runtime.vitals.ask(self.faults, lambda: {"models": sorted(self._models.served())})
        self._runtime.directory.subscribe(self._on_change)
        self._runtime.tasks.create_task(self._ping(), name="ping routers")

    def faults(self) -> list[str]:
        """Why a request would not be served; empty: it would."""
        if not self._runtime.bus.connected:
            return ["NATS is not connected"]
        faults = []
        if not self._routers():
            faults.append("no router is there")
        elif self._failures >= FAILURES:
            faults.append("no router answers")
        if not self._models.served():
            faults += self._models.reasons() or ["no worker is there"]
        return faults

    def _on_change(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp) and change.instance.service == "router":
            self._appeared.set()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            routers = self._routers()
            if any(await asyncio.gather(*map(self._answers, routers))):
                self._failures = 0
            elif routers and loop.time() - began < 2 * PING_TIMEOUT_S:  # else this process itself stood still
                self._failures += 1
            self._appeared.clear()
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    await self._appeared.wait()
            except TimeoutError:
                pass

    def _routers(self) -> list[str]:
        routers = [one.instance for one in self._runtime.directory.instances.values() if one.service == "router"]
        return self._runtime.draw.sample(routers, min(PINGED, len(routers)))

    async def _answers(self, router: str) -> bool:
        subject = subjects.control(self._runtime.namespace, "router", router)
        try:
            await self._runtime.bus.request(subject, PING.encode(Ping()), timeout_s=PING_TIMEOUT_S)
        except Unavailable:
            return False
        return True
