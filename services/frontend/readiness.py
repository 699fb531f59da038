"""Answers whether a request would be served now. It asks no one at that moment, so that a flood cannot make it flap.

Routers are pinged every PING_EVERY_S, and at once when one appears. A frontend is unready after FAILURES rounds without
any answer: a busy fleet answers late now and then.
"""

from __future__ import annotations

import asyncio

from services.frontend.models.registry import ModelRegistry
from services.frontend.requests.calls import sample_routers
from shared import subjects
from shared.discovery.directory import DirectoryChange, InstanceUp
from shared.errors import Unavailable
from shared.messages.control import PING, Ping
from shared.runtime.runtime import Runtime

PING_EVERY_S = 1.0
"""Seconds between two rounds."""
PING_TIMEOUT_S = 1.0
"""Seconds that a router may take to answer."""
FAILURES = 3
"""The number of failed rounds in a row after which the frontend is unready."""
PINGED = 3
"""The number of routers pinged in one round, drawn at random each time."""


class Readiness:
    """The readiness of one frontend."""

    def __init__(self, runtime: Runtime, models: ModelRegistry) -> None:
        self._runtime = runtime
        self._models = models
        self._failures = FAILURES
        """The number of failed rounds in a row; at the start no router has answered."""
        self.started = False
        """Whether its ports are open, and others find it."""
        self._appeared = asyncio.Event()

    def start(self) -> None:
        """Ping routers from now on, and answer for this process's health."""
        self._runtime.health.delegate(self.faults, self._models_shown)
        self._runtime.directory.subscribe(self._on_change)
        self._runtime.tasks.create_task(self._ping(), name="ping routers")

    def faults(self) -> list[str]:
        """Return why a request would not be served; empty if it would."""
        if not self._runtime.bus.connected:
            return ["NATS is not connected"]
        faults = [] if self.started else ["it is starting"]
        if not sample_routers(self._runtime, PINGED):
            faults.append("no router is there")
        elif self._failures >= FAILURES:
            faults.append("no router answers")
        if not self._models.served():
            faults += self._models.faults() or [self._models.absence]
        return faults

    def _models_shown(self) -> dict[str, list[str]]:
        faults = {"not_served": self._models.faults(), "cards_not_loaded": self._models.card_faults()}
        return {"models": sorted(self._models.served()), **{name: why for name, why in faults.items() if why}}

    def _on_change(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp) and change.instance.service == "router":
            self._appeared.set()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            routers = sample_routers(self._runtime, PINGED)
            if any(await asyncio.gather(*map(self._answers, routers))):
                self._failures = 0
            elif routers and loop.time() - began < 2 * PING_TIMEOUT_S:  # otherwise this process itself stood still
                self._failures += 1
            self._appeared.clear()
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    await self._appeared.wait()
            except TimeoutError:
                pass

    async def _answers(self, router: str) -> bool:
        subject = subjects.control(self._runtime.namespace, "router", router)
        try:
            await self._runtime.bus.request(subject, PING.encode(Ping()), timeout_s=PING_TIMEOUT_S)
        except Unavailable:
            return False
        return True
